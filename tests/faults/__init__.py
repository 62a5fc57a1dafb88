"""The battery of faults: real processes under every fault that Handrail promises to bear. ``python -m tests.faults``."""
