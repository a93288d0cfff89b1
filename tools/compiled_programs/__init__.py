"""docs/compiled-programs.md: what the step programs of each family need, as compilers of accelerators have them."""
