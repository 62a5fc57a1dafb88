"""TLS and tokens from files that change."""
