"""The ``handrail demo`` command."""
