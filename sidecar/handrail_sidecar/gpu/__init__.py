"""GPUs as NVML sees them: which there are, what they count, and a sampler that no call can hold up.

Standard library only; ``pynvml`` (extra ``gpu``) is imported when a session is opened.
"""
