"""The battery of faults, run with ``python -m tests.faults``.

It puts real processes under every fault that Handrail promises to withstand.
"""
