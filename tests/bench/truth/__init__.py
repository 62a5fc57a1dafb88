"""Judge whether Handrail's statements about slow requests are true.

It injects every fault of the emulated fleet and compares the statements with what truly happened.
"""
