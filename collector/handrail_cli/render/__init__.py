"""Render answers as text for a terminal."""
