"""Checks of a pair: pure functions of facts."""
