"""Join evidence into requests."""
