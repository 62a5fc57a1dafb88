"""The metric families of every engine, router and transport, old names and new, as one schema in base units."""
