"""Cases for every alert: the series for the rules, and what must fire.

Each alert has at least one firing and one silent case.
"""
