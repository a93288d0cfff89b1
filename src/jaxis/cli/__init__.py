"""The command line: `jaxis generate`, `jaxis chat`, `jaxis bench`, `jaxis env`."""
