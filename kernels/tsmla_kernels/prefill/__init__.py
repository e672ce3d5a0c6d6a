"""What the prefill kernels of all architectures share: which tiles a CTA takes, copies of ragged packs, calls."""
