"""Turn a joined request into phases, outcomes and findings; pure functions."""
