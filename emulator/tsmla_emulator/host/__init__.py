"""The host side: exported objects linked against a recording double, and CPU tensors that say they are CUDA."""
