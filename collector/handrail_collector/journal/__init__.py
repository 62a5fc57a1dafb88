"""The durable log between acknowledgement and store."""
