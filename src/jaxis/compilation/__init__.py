"""Programs for accelerators that need not be present: data sheets, compilers, and the costs of a program."""
