"""Repeat calls that may hang, in threads that outlive them.

``gpu`` and ``links`` use it.
"""
