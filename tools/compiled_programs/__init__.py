"""Compiled step programs of each family, as accelerators' compilers have them: docs/compiled-programs.json."""
