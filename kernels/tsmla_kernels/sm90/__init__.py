"""Kernels for Hopper (sm_90a): TMA loads, warpgroup MMA, accumulators in registers."""
