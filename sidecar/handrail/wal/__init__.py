"""The append-only log that spool and journal share."""
