"""Sample the devices that move KV between hosts: RDMA ports and network interfaces.

The kernel's counters are read with the standard library only.
"""
