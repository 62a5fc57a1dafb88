"""Links that move KV from P to D: their rate, their transport, their faults.

Everything here is pure; stored data comes in through ``answer.py``.
"""
