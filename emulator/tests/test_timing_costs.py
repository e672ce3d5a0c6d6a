"""What the timing model takes instructions and partial results for: classes, polling, matrix rates, bytes."""

from __future__ import annotations

import pytest
from small_kernels import text_of
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla_emulator.run.machine import parse
from tsmla_emulator.run.ptx.lower import lower
from tsmla_emulator.time import classes, costs, rates
from tsmla_emulator.time.problem import partial_row_bytes

WAITING = """
mov.b32 %r3, smem;
shr.u32 %r1, %r1000, 5;
setp.ne.s32 %p1, %r1, 0;
setp.eq.s32 %p2, %r1001, 0;
setp.eq.s32 %p4, %r1000, 0;
@%p4 mbarrier.init.shared.b64 [%r3], 1;
bar.sync 0;
mov.b32 %r5, {times};
mov.b32 %r6, 0;
@%p1 bra WAIT;
WORK:
mov.b32 %r7, 100;
SLOW:
sub.s32 %r7, %r7, 1;
setp.ne.s32 %p3, %r7, 0;
@%p3 bra SLOW;
@%p2 mbarrier.arrive.shared.b64 _, [%r3];
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p3, %r5, 0;
@%p3 bra WORK;
bra DONE;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], %r6;
@%p5 bra GO;
bra WAIT;
GO:
xor.b32 %r6, %r6, 1;
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p3, %r5, 0;
@%p3 bra WAIT;
DONE:
"""


def test_polling_loop_is_the_way_back_that_does_nothing_else():
    text = text_of(WAITING.format(times=1), 1, "sm_90a", 64)
    entry = parse(text).entries["k"]
    opcodes = [instruction.opcode for instruction in entry.instructions]
    tried = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("mbarrier.try_wait"))
    assert classes.polling_loop(entry, tried) == (tried, tried + 1, tried + 2)
    once = parse(text.replace("bra WAIT;\nGO:", "fma.rn.f32 %r8, %r8, %r8, %r8; bra WAIT;\nGO:")).entries["k"]
    assert classes.polling_loop(once, tried) == ()


MEASURED = [
    (64, 128, False, True, 64.6), (64, 256, False, True, 128.6), (128, 64, False, True, 48.6),
    (128, 128, False, True, 64.6), (128, 256, False, True, 128.6), (128, 64, False, False, 32.5),
    (256, 128, True, True, 64.8), (256, 256, True, True, 128.7), (128, 128, True, True, 32.7),
    (128, 256, True, True, 64.4), (256, 64, True, True, 43.4),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "pair", "a_shared", "clocks"), MEASURED)
def test_matrix_rates_are_a_bound_close_to_what_a_b200_was_measured_to_take(rows, columns, pair, a_shared, clocks):
    bound = rates.blackwell_mma(rows, columns, pair, a_shared)
    assert 0.92 * clocks < bound <= clocks


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("fma.rn.f32x2", "fp32x2"), ("mad.lo.s32", "integer"), ("setp.lt.s32", "compare, select"),
        ("not.pred", "compare, select"),
        ("ld.param.b64", "move"), ("ld.global.v4.b32", "global memory"), ("st.shared::cluster.b32", "shared memory"),
        ("ld.b32", "other"), ("cp.async.cg.shared.global", "shared memory"), ("cp.async.wait_group", "synchronise"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", "synchronise"), ("cp.async.bulk.commit_group", "synchronise"),
        ("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes", "bulk copy"),
        ("wgmma.wait_group.sync.aligned", "synchronise"), ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("max.NaN.f32", "fp32 min/max"), ("max.s32", "integer"), ("bar.warp.sync", "synchronise"),
    ],
)  # fmt: skip
def test_classes(opcode, kind):
    assert classes.class_of(opcode) == kind


@pytest.mark.parametrize(
    ("arch", "dtype", "row", "few", "more"),
    [
        (Arch.SM90A, Dtype.BF16, None, 1036, 1036),  # of 16 bits, an LSE, two factors
        (Arch.SM90A, Dtype.FP16, None, 2052, 2052),
        (Arch.SM90A, Dtype.E4M3, None, 1028, 1028),
        (Arch.SM90A, Dtype.E5M2, None, 2052, 2052),
        (Arch.SM90A, Dtype.E4M3, "snapmla", 1044, 1032),  # a factor of each warp's columns, or of the row
        (Arch.SM90A, Dtype.BF16, "fp8_ds_mla", 1044, 1036),
        (Arch.SM100A, Dtype.BF16, None, 2052, 2052),
        (Arch.SM100A, Dtype.E4M3, None, 1028, 1028),
        (Arch.SM100A, Dtype.E4M3, "snapmla", 2052, 2052),
    ],
)
def test_bytes_of_partial_rows(arch: Arch, dtype: Dtype, row: str | None, few: int, more: int) -> None:
    """Calls have up to 16 query rows, or more."""
    stored = ROWS[row] if row else uniform_row(dtype)
    variant = DecodeVariant(arch, dtype, Dtype.BF16, lse=False, row=stored)
    assert [partial_row_bytes(variant, rows) for rows in (1, 16, 17)] == [few, few, more]


def test_a_copy_to_tensor_memory_keeps_the_tensor_core_for_its_bytes():
    text = text_of("tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r1], %d1;", 1, "sm_100a", 32)
    entry = parse(text).entries["k"]
    (flags,) = (lower(entry, one).flags for one in entry.instructions if one.opcode.startswith("tcgen05"))
    assert costs.product_clocks(flags, 64 * 16, 1) == 8
