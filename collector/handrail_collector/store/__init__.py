"""Tables, files and queries."""
