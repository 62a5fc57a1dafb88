"""The links that KV moves over, P to D: how fast, by what, and why not faster. Pure; what is stored comes in by ``answer.py``."""
