"""Common parts of every long-running process: signals, shutdown, admin HTTP server."""
