"""The one declaration of each argument of an engine, with the check of its value, a file for each feature."""
