"""The kinds of tables."""
