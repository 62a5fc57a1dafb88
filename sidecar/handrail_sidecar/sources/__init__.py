"""Sources of records, one module each."""
