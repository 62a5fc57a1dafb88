"""Durable log of what was acknowledged and is not yet stored."""
