"""Repeat calls that may hang, in threads that outlive them; used by ``gpu`` and ``links``."""
