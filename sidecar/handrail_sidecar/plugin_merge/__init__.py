"""What several processes of one engine say, as one fact a request: no I/O, the clocks come in."""
