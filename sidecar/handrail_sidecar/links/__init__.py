"""What moves KV between hosts, as the kernel counts it: ports of RDMA adapters and network interfaces. Standard library only."""
