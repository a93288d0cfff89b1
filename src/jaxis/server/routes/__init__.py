"""The server's routes, a file for each kind."""
