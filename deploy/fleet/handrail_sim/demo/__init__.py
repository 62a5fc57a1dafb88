"""The `handrail demo` command."""
