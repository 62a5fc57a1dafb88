"""Compare two or three arms: does a split of prefill and decode pay?"""
