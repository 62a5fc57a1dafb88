"""Sample GPU counters through NVML without blocking on a call that hangs.

The package lists the GPUs, knows their counters, and runs the sampler.
Standard library only; ``pynvml`` (extra ``gpu``) is imported when a session is opened.
"""
