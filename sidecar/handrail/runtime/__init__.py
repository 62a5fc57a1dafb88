"""Common parts of all long-running processes: signals, shutdown, admin HTTP."""
