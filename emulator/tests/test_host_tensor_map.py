"""Tensor maps: bits where the driver puts them, and back."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import struct

import pytest
from tsmla_emulator.run.host import capture
from tsmla_emulator.run.host.tensor_map import DTYPES, SWIZZLES, TensorMap
from tsmla_emulator.run.machine import EmulationError

MAP = TensorMap(
    address=0x7F12_3456_7890,
    dtype="bf16",
    shape=(192, 300, 5),
    strides=(768, 2**37 + 32),
    box=(64, 128, 256),
    element_strides=(1, 2, 8),
    swizzle=128,
    nan_fill=True,
)


def test_bits_of_an_example():
    words = struct.unpack("<16Q", MAP.encode())
    assert words[0] == MAP.address
    assert words[1] & 0xFFFFFFFF == 2 << 4 | 10 << 7 | 3 << 13 | 1 << 15
    assert words[1] >> 32 == 768 // 16
    assert words[2] == (2**37 + 32) // 16 % 2**32
    assert words[3] == (2**37 // 16 >> 32) << (32 + 4)
    assert words[4] == 191 | 299 << 32 and words[5] == 4
    assert words[6] == (0 | 1 << 3 | 7 << 6) << 32 | 63 << 56
    assert words[7] == 127 | 255 << 8
    assert not any(words[8:])


@pytest.mark.parametrize("rank", range(1, 6))
def test_round_trip_of_every_rank_dtype_and_swizzle(rank):
    for (dtype, _), swizzle in itertools.product(DTYPES.values(), SWIZZLES):
        made = TensorMap(
            address=16 * rank,
            dtype=dtype,
            shape=tuple(range(2**32 - rank, 2**32)),
            strides=tuple(16 * (i + 2**33) for i in range(rank - 1)),
            box=tuple(range(256 - rank, 256)),
            element_strides=tuple(range(1, rank + 1)),
            swizzle=swizzle,
        )
        assert TensorMap.decode(made.encode()) == made


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"dtype": "e4m3"}, "known: u8"),
        ({"box": (64, 128)}, "one rank"),
        ({"box": (64, 128, 257)}, "1 to 256"),
        ({"strides": (768, 40)}, "multiples of 16"),
        ({"address": 8}, "multiples of 16"),
        ({"element_strides": (1, 1, 9)}, "1 to 8"),
        ({"shape": (0, 128, 64)}, "sizes must be 1 to"),
        ({"shape": (64, 128, 2**32 + 1)}, "sizes must be 1 to"),
    ],
)
def test_what_a_map_cannot_hold(wrong, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(MAP, **wrong).encode()


def encoded(**changes) -> bytes:
    """What a call of cuTensorMapEncodeTiled makes, by the driver's numbers."""
    given = {"data_type": 9, "rank": 3, "address": MAP.address, "swizzle": 3, "fill": 1, **changes}
    call = capture._TensorMapCall(
        **given,
        sizes=(ctypes.c_uint64 * 3)(*MAP.shape),
        strides=(ctypes.c_uint64 * 2)(*MAP.strides),
        box=(ctypes.c_uint32 * 3)(*MAP.box),
        element_strides=(ctypes.c_uint32 * 3)(*MAP.element_strides),
    )
    made = (ctypes.c_ubyte * 128)()
    capture._encode_tensor_map(ctypes.pointer(call), ctypes.addressof(made))
    return bytes(made)


def test_host_code_may_ask_the_driver():
    assert encoded() == MAP.encode()
    assert TensorMap.decode(encoded(data_type=12)).dtype == "tf32_ftz"
    assert {TensorMap.decode(encoded(data_type=number)).dtype for number in range(13)} == {
        name for name, _ in DTYPES.values()
    }
    with pytest.raises(EmulationError, match="tensor map of swizzle 4"):
        encoded(swizzle=4)


def test_other_bytes_are_not_a_map():
    with pytest.raises(ValueError, match="not a tensor map"):
        TensorMap.decode(bytes([0xFF]) * 128)
