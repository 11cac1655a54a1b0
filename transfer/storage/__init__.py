"""Memory without a host address: files and GPUs, their peers, and the buffers between."""
