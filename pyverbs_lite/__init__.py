"""RDMA for Python."""
