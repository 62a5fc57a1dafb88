"""All crash points of the journal and the store: ``python -m tests.crash``."""
