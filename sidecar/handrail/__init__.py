"""Handrail: one request, one trace, across the prefill/decode hand-off.

This package is imported inside the engine's process, so importing it loads the standard library only.
"""

__version__ = "0.1.0"
