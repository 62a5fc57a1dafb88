"""Two or three arms side by side: does splitting prefill from decode pay?"""
