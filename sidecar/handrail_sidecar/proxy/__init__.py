"""The HTTP/1.1 reverse proxy and what it observes."""
