"""The size of a model's KV cache, from its config.json alone.

It gives bytes a token, and the bytes of one request's hand-off.
"""
