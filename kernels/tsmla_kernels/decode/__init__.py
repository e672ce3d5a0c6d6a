"""What the decode kernels of all architectures share beside parts: the kernel that combines partial results."""
