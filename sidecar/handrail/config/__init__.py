"""Configuration: declaration, types, listeners."""
