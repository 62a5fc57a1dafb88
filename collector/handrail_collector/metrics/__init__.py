"""Joined metrics: what needs the joined request before it can be counted."""
