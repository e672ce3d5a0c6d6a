"""Reads the 128 bytes of a CUtensorMap, and makes them for a launch that is written by hand.

Bit positions are those that a driver's encoder was seen to fill on an H200; the DSL writes the same ones inline. Words
8 and up are the driver's own bookkeeping and not read.
"""

from __future__ import annotations

import dataclasses
import struct

DTYPES = {
    0: ("u8", 1),
    1: ("u16", 2),
    2: ("u32", 4),
    3: ("s32", 4),
    4: ("u64", 8),
    5: ("s64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    8: ("f32_ftz", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
    16 + 7: ("tf32", 4),
    16 + 8: ("tf32_ftz", 4),
}
"""Code in a map -> name, bytes. 16 stands for the bit that makes a float code tf32. FP8 tensors are u8."""
DRIVER_DTYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
"""Names of dtypes in the order of CUtensorMapDataType's numbers."""
SWIZZLES = (0, 32, 64, 128)
"""Bytes of a swizzle pattern's row, in the order of their codes."""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map; every tuple starts with the innermost dimension.

    strides: bytes, of dimensions 1 and up (the innermost is contiguous). swizzle: 0, 32, 64 or 128 bytes.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    nan_fill: bool = False
    interleave: int = 0

    @property
    def rank(self) -> int:
        return len(self.shape)

    @classmethod
    def decode(cls, content: bytes) -> TensorMap:
        """Read the first 64 of the 128 bytes. Raises ValueError for a dtype code that means nothing."""
        words = struct.unpack("<8Q", content[:64])
        low = words[1] & 0xFFFFFFFF
        rank, code = (low >> 4 & 7) + 1, low >> 7 & 15 | low >> 12 & 16
        if code not in DTYPES or rank > 5:
            raise ValueError(f"not a tensor map: dtype code {code}, rank {rank} in word {low:#010x}")
        halves = struct.unpack("<16I", content[:64])
        stride_lows, sizes = halves[3:7], halves[8:13]
        high = halves[7]
        strides = tuple((low + ((high >> 4 * i & 15) << 32)) * 16 for i, low in enumerate(stride_lows))
        element_strides, boxes = halves[13], words[6] >> 56 | words[7] << 8
        return cls(
            address=words[0],
            dtype=DTYPES[code][0],
            shape=tuple(size + 1 for size in sizes[:rank]),
            strides=strides[: rank - 1],
            box=tuple((boxes >> 8 * i & 255) + 1 for i in range(rank)),
            element_strides=tuple((element_strides >> 3 * i & 7) + 1 for i in range(rank)),
            swizzle=SWIZZLES[low >> 13 & 3],
            nan_fill=bool(low >> 15 & 1),
            interleave=low >> 11 & 3,
        )

    def encode(self) -> bytes:
        """128 bytes, aligned by the caller to 64. Raises ValueError for what a map cannot hold."""
        code = next((code for code, (name, _) in DTYPES.items() if name == self.dtype), None)
        if code is None:
            raise ValueError(f"dtype is {self.dtype}; known: {', '.join(name for name, _ in DTYPES.values())}")
        lengths = {len(self.shape), len(self.strides) + 1, len(self.box), len(self.element_strides)}
        if lengths != {self.rank} or not 1 <= self.rank <= 5:
            raise ValueError(f"shape, strides, box and element_strides do not describe one rank of 1 to 5: {self}")
        if self.address % 16 or any(stride % 16 or not 0 <= stride < 2**40 for stride in self.strides):
            raise ValueError(f"address and strides must be multiples of 16 bytes, strides below 2**40: {self}")
        if any(not 1 <= size <= 2**32 for size in self.shape):
            raise ValueError(f"sizes must be 1 to 2**32: {self}")
        if any(not 1 <= size <= 256 for size in self.box) or any(not 1 <= s <= 8 for s in self.element_strides):
            raise ValueError(f"box sizes must be 1 to 256 and element strides 1 to 8: {self}")
        low = (
            self.rank - 1 << 4
            | (code & 15) << 7
            | (code & 16) << 12
            | self.interleave << 11
            | SWIZZLES.index(self.swizzle) << 13
        )
        units = [stride // 16 for stride in self.strides] + [0] * (5 - self.rank)
        high = sum((unit >> 32) << 4 * i for i, unit in enumerate(units))
        sizes = [size - 1 for size in self.shape] + [0] * (5 - self.rank)
        boxes = sum((size - 1) << 8 * i for i, size in enumerate(self.box))
        element_strides = sum((stride - 1) << 3 * i for i, stride in enumerate(self.element_strides))
        return struct.pack(
            "<QI4II5IIQ64x",
            self.address,
            low | self.nan_fill << 15,
            *(unit & 0xFFFFFFFF for unit in units),
            high,
            *sizes,
            element_strides | (boxes & 255) << 24,
            boxes >> 8,
        )
