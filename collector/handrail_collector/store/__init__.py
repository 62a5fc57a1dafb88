"""Tables, files and queries of the store."""
