"""Append-only log that spool and journal share."""
