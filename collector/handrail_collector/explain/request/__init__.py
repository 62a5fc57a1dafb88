"""Explain one request: phases, hand-offs, findings."""
