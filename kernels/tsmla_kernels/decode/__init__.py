"""What the decode kernels of all architectures share: how work is divided, and how partial results are combined."""
