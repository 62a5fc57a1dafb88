"""What every long-running process shares: signals, shutdown, the admin HTTP server."""
