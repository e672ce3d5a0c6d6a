"""What the GPUs have, and what every kernel keeps to."""

from __future__ import annotations

WARPGROUP = 128
"""Threads of a warpgroup."""
SHARED_BYTES_PER_CTA = 227 * 1024
"""Opt-in shared memory that one CTA can have on sm_90a, sm_100a and sm_103a (CUDA programming guide)."""
SHARED_BYTES_PER_SM = SHARED_BYTES_PER_CTA + 1024
"""Shared memory of an SM: a CTA takes 1024 bytes of it more than it asks for (CUDA programming guide)."""
REGISTERS_PER_SM = 64 * 1024
TMEM_COLUMNS = 512
"""32-bit columns of tensor memory, 128 lanes each, of one sm_100a or sm_103a SM."""
VECTOR_BYTES = 16
"""Bytes that a lane copies at a time: the most that one instruction does."""
VECTOR_WORDS = VECTOR_BYTES // 4
SWIZZLE_BYTES = 128
"""Bytes of a row of the widest swizzle pattern, within which its vectors are swizzled."""
TILE_ALIGNMENT = 8 * SWIZZLE_BYTES
"""The widest swizzle pattern has eight rows, and each tile starts where one does."""


def registers_at_launch(threads: int) -> int:
    """Registers of each thread where a CTA of this many threads has an SM for itself: they are given out in eights.
    `setmaxnreg` moves what a CTA was launched with, not what the SM has besides (PTX ISA)."""
    return REGISTERS_PER_SM // threads // 8 * 8


def swizzle_bytes(row_bytes: int) -> int:
    """Over how many bytes the rows of a K-major tile are swizzled: the largest span that divides them."""
    return next(span for span in (SWIZZLE_BYTES, 64, 32) if row_bytes % span == 0)
