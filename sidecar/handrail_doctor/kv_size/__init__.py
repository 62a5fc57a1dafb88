"""How large a model's KV cache is, by its config.json alone: bytes a token, and what a hand-off of one request moves."""
