"""Provide the ``handrail`` command line."""
