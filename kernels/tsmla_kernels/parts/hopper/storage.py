"""How Hopper's kernels cut shared memory."""

BARRIER_BYTES = 1024
"""Room kept for mbarriers ahead of the first 1024-byte aligned tile."""
