"""What the prefill kernels of all architectures share beside parts: their signature."""
