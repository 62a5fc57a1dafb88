"""Every crash point of the journal and the store, enumerated: ``python -m tests.crash``."""
