"""From spans to requests."""
