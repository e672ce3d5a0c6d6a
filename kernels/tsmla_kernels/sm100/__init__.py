"""Kernels for Blackwell (sm_100a, sm_103a): TMA loads, tcgen05 MMA, accumulators in tensor memory."""
