"""Read metrics pages of engines, routers and transports into one schema.

Old and new metric names become the same quantities, in base units.
"""
