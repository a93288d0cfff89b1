"""The appendix of docs/accelerators.md: compiled step programs of each family, as accelerators' compilers have them."""
