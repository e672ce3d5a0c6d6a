"""The host side: exported objects linked with a recording double, and CPU tensors that say they are CUDA."""
