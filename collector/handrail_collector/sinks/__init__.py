"""Destinations of accepted data besides the store."""
