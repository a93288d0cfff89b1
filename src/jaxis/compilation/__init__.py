"""Programs for accelerators that need not be there: their data sheets, their compilers, and what a program costs."""
