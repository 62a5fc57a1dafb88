"""Sample the devices that move KV between hosts: RDMA ports and NICs.

The kernel's counters are read with the standard library only.
"""
