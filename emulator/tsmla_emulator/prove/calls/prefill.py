"""Prefills that `check` makes of a variant, and what they must give."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.key_mask import MASK_BITS, words_for
from tsmla.identity.support import NOPE_DIMS
from tsmla.identity.variant import PrefillVariant
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.prefill import mask_words, rmse_of_rounding, weight_dtype

from .reference import SINKS, attention, judged, merged, summed_as_hardware, with_sinks

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Query and KV lengths of the sequences of a prefill."""
PREFILL_SMS = 1
"""SMs of a small prefill: so few that a CTA of Hopper's takes several query tiles, if its kernel can."""
PREFILL_LENGTHS = ((70, 1, 130), (200, 0, 130))
"""Query and KV lengths of the sequences of a small prefill."""
PREFILL_BOUNDS = ((1,) * 159, tuple(range(1, 160)))
"""Query and KV lengths of a prefill in which keys end in every column of a tile."""
PREFILL_DEEP = ((260, 0, 200), (700, 30, 40))
"""Query and KV lengths of a prefill whose query tiles see many KV tiles in full, or, where causal, none."""
PREFILL_LISTED = ((260, 0, 200), (4200, 30, 40))
"""Query and KV lengths of such a prefill with a key mask: more tiles than the survey of a mask, a warp for each, sees
at once."""
_GROWTH = 3.0
"""How many times as large as the last keys of a sequence its first are, in a deep prefill: they are visited last, and
kernels move references that scores leave behind by more than 2^8."""
_BACK = 5
"""Rows by which a sequence without queries ends before it starts, in a deep prefill."""
_THIN = 8
"""Elements from one row of a long pack to the next. Rows overlap, so that hundreds of thousands of them that belong to
no sequence take a few MB."""


def has_kernel_of_long_sequences(variant: PrefillVariant) -> bool:
    """Return whether sequences of more than LONG_KEYS keys, on average, have a kernel of their own, whose CTAs take one
    query tile each."""
    # Here: the kernels' sizes, which other operators are checked without.
    from tsmla_kernels.sm90.prefill.policy import policy_of

    return variant.arch is Arch.SM90A and policy_of(variant).alone_if_long


def prefill_kernels(variant: PrefillVariant) -> int:
    """Return how many GPU kernels a variant chooses from."""
    return 1 + has_kernel_of_long_sequences(variant)


def prefill(
    variant: PrefillVariant,
    lengths: Lengths,
    merges: bool,
    long: bool = False,
    sums: bool = False,
    sinks: bool = False,
    deep: bool = False,
) -> tuple[str, str | None]:
    """Call a prefill, and compare it with float64. One with a key mask is causal, too, unless it merges.

    long: put so many rows of no sequence, which are NaN, behind the keys that the kernel of long sequences runs.
    sums: 8-bit numbers are summed as tensor cores do.
    sinks: each head has one, which the LSE counts unless the call merges and is not deep.
    deep: for PREFILL_DEEP and PREFILL_LISTED. Unless `long`, a sequence's first keys are larger than its last; whole
        tiles of a mask follow a partial one; a sequence without queries ends before it starts.
    """
    lengths_q, lengths_kv = lengths
    heads, heads_kv = 2, 1
    d_nope = NOPE_DIMS[variant.d_qk]
    in_pieces = merges and variant.d_qk > d_nope

    def random(rows: int, count: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, count, dim, device="cuda").to(TORCH_DTYPE_OF[variant.dtype])

    def given(x: torch.Tensor) -> Any:
        return tuple(x.split([d_nope, variant.d_qk - d_nope], -1)) if in_pieces else x

    q = random(sum(lengths_q), heads, variant.d_qk)
    keys, longest = sum(lengths_kv), max(lengths_kv)
    causal = variant.causal or variant.masked and not merges
    bits = torch.rand(len(q), words_for(longest) * MASK_BITS, device="cuda") < 0.4
    bits[: lengths_q[0], 128:] = deep  # tiles without a bit, or with all
    bits[-lengths_q[-1] :, :128] = True  # one with all bits
    k, v = (
        _with_rows_of_no_sequence(variant, len(lengths_kv), keys, dim) if long else random(keys, heads_kv, dim)
        for dim in (variant.d_qk, variant.d_v)
    )
    if deep and not long:
        growth = torch.cat([torch.linspace(_GROWTH, 1.0, length, device="cuda") for length in lengths_kv])
        k = (k.float() * growth[:, None, None]).to(k.dtype)
    scale = 1 / math.sqrt(variant.d_qk)
    options: dict[str, Any] = {"key_mask": mask_words(bits)} if variant.masked else {}
    of_heads = torch.linspace(*SINKS, heads, device="cuda")
    if sinks:
        counted = variant.lse and (deep or not merges)
        options |= {"sinks": of_heads, "lse_includes_sink": counted}
    earlier: Any = None
    if merges and variant.lse:
        earlier_out = torch.randn(len(q), heads, variant.d_v, device="cuda").to(TORCH_DTYPE_OF[variant.out_dtype])
        earlier_lse = 4 + torch.randn(len(q), heads, device="cuda")
        earlier_out[::7], earlier_lse[::7] = 0.0, -math.inf
        earlier = earlier_out.double(), earlier_lse.double()
        options["merge_into"] = earlier_out, earlier_lse
    result: Any = tsmla.tsmla_prefill(
        given(q),
        given(k),
        v,
        None,
        _ends(lengths_kv),
        max(lengths_kv),
        len(lengths_kv),
        scale,
        causal,
        variant.lse,
        _ends(lengths_q, _BACK * deep),
        max(lengths_q),
        True,
        out_dtype=TORCH_DTYPE_OF[variant.out_dtype],
        **options,
    )
    out, lse = result if variant.lse else (result, None)
    sequences = (q.split(lengths_q), *(x[:keys].split(lengths_kv) for x in (k, v)), bits.split(lengths_q))
    parts = []
    for own, seen, values, own_bits in zip(*sequences, strict=True):
        made = summed_as_hardware(variant.arch, own, seen[:, 0]) if sums else None
        shown = own_bits if variant.masked else None
        parts.append(attention(own, seen, values, scale, causal, bits=shown, made=made))
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if earlier is not None:
        expected, expected_lse = merged((expected, expected_lse), earlier)
    if sinks:
        expected, lse_with_sinks = with_sinks(expected, expected_lse, of_heads)
        expected_lse = lse_with_sinks if counted else expected_lse
    step = rmse_of_rounding(weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype]), out.dtype)
    measured, error = judged(out, lse, expected, expected_lse, step, q.dtype)
    ways = {
        "with sinks": sinks, "in pieces": in_pieces, "merged": earlier is not None, "with rows of no sequence": long,
        "with many keys": deep,
    }  # fmt: skip
    how = " and ".join(way for way, taken in ways.items() if taken)
    return (f"{how}: {measured}", error and f"{how}: {error}") if how else (measured, error)


def _with_rows_of_no_sequence(variant: PrefillVariant, sequences: int, rows: int, dim: int) -> torch.Tensor:
    """Return random rows of one head, and behind them so many of NaN that the kernel of long sequences runs."""
    from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

    more = LONG_KEYS * sequences + 1
    numbers = torch.full((_THIN * (rows + more) + dim,), math.nan, dtype=torch.float32, device="cuda")
    numbers[: _THIN * rows + dim] = torch.randn(_THIN * rows + dim, device="cuda")
    return numbers.to(TORCH_DTYPE_OF[variant.dtype]).as_strided((rows + more, 1, dim), (_THIN, _THIN, 1))


def _ends(lengths: tuple[int, ...], back: int = 0) -> torch.Tensor:
    """Return where sequences end; those without rows, so many rows before they start."""
    ends = [end - back * (length == 0) for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)]
    return torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
