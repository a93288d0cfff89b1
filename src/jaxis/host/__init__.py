"""The process and its machine: processor, signals, logs, progress, files."""
