"""Tables of the counters of GPUs and links."""
