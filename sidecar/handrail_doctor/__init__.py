"""Checks of a prefill/decode pair before traffic: facts are gathered at the edge, judged by pure functions, each with its
reason."""
