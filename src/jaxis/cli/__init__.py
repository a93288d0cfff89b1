"""The command line: `jaxis generate`, `jaxis chat`, `jaxis env`."""
