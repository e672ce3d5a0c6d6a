"""wheels/compare_launches.py: which bytes of a launch it compares, and that it finds the ones that differ."""

from __future__ import annotations

import copy
import random

import compare_launches
import exported_ir
import pytest

IR = """
define internal i32 @launching(ptr %0) {
  %1 = alloca [3 x ptr], align 8
  %2 = alloca { ptr addrspace(1), { i32, {} } }, align 8
  store ptr %2, ptr %1, align 8
  %3 = alloca { { [16 x i64] } }, align 64
  %4 = getelementptr inbounds nuw i8, ptr %1, i64 8
  store ptr %3, ptr %4, align 8
  %5 = alloca float, align 4
  %6 = getelementptr inbounds nuw i8, ptr %1, i64 16
  store ptr %5, ptr %6, align 8
  %7 = call i32 @_cudaLaunchKernelEx(ptr nonnull %0, ptr %0, ptr nonnull %1)
  ret i32 %7
}
"""
SIZES = (16, 128, 4)
SET = (range(12), range(64), range(4))


@pytest.mark.parametrize(
    ("text", "size", "alignment", "members"),
    [
        ("i32", 4, 4, range(4)),
        ("i1", 1, 1, range(1)),
        ("half", 2, 2, range(2)),
        ("ptr addrspace(1)", 8, 8, range(8)),
        ("{}", 0, 1, ()),
        ("{ i8, i32 }", 8, 4, (0, 4, 5, 6, 7)),
        ("{ {}, { { i32, i16 }, {} } }", 8, 4, range(6)),
        ("[2 x { i64, i8 }]", 32, 8, (*range(9), *range(16, 25))),
    ],
)
def test_layout_of_types(text, size, alignment, members):
    assert exported_ir.layout(text) == (size, alignment, tuple(members))


@pytest.mark.parametrize("text", ["fp128", "{ i32, x86_mmx }", "i32 i32"])
def test_types_that_are_not_known(text):
    with pytest.raises(ValueError):
        exported_ir.layout(text)


def launch(rng: random.Random) -> compare_launches.Launches:
    """One launch of IR's kernel whose parameters hold random bytes."""
    return [{"symbol": "kernel", "grid": [1, 2, 3], "parameters": [rng.randbytes(size).hex() for size in SIZES]}]


def changed(one: compare_launches.Launches, number: int, offset: int) -> compare_launches.Launches:
    """With one bit of one byte of a parameter flipped."""
    other = copy.deepcopy(one)
    content = bytearray.fromhex(other[0]["parameters"][number])
    content[offset] ^= 4
    other[0]["parameters"][number] = content.hex()
    return other


def test_every_byte_that_is_set_counts_and_no_other():
    one = launch(random.Random())
    for number, size in enumerate(SIZES):
        for offset in range(size):
            found = compare_launches.differences(one, changed(one, number, offset), lambda symbol: IR)
            wanted = [f"launch 0: bytes [{offset}] of parameter {number} differ"] if offset in SET[number] else []
            assert found == wanted


def test_launches_that_differ_otherwise():
    one = launch(random.Random())
    assert compare_launches.differences(one, [one[0] | {"grid": [1, 2, 4]}], lambda symbol: IR) == [
        "launch 0: grid is [1, 2, 3], and [1, 2, 4]"
    ]
    assert compare_launches.differences(one, [], lambda symbol: IR) == ["1 launches, and 0"]
    assert compare_launches.differences([], [], lambda symbol: IR) == ["0 launches, and 0"]
    with pytest.raises(ValueError, match=r"0 launches in the IR have parameters of \[16, 128, 4\] bytes"):
        compare_launches.differences(one, one, lambda symbol: IR.replace("float", "double"))
