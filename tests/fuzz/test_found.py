"""Cases that failed once, on architectures whose kernels for them are their own; what they do not say is as by
default."""

from __future__ import annotations

import math

import pytest
import tsmla
from emulated_archs import has_a_text_of_its_own

from .cache_case import CacheCase
from .chosen_case import ChosenCase
from .decode_case import DecodeCase
from .face_case import FaceCase
from .places import ARCHS, Place, Schedule
from .prefill_case import PrefillCase
from .properties import Case, case_of, check
from .reference_decode import Sight
from .refusal_case import Refusal
from .scaled_rows import Scaling

FOUND: dict[str, Case] = {
    "prefill: more queries than a tile has, one key": PrefillCase(ends_q=(0, 129), tokens_q=129),
    "prefill: a tile of queries before any key": PrefillCase(
        ends_q=(0, 257), ends_kv=(0, 63), tokens_q=257, tokens_kv=63, schedule=Schedule(races=False)
    ),
    "prefill: output of a single row with odd strides": PrefillCase(out="odd where single"),
    "prefill: value of a single row with odd strides": PrefillCase(layouts=("contiguous",) * 2 + ("odd where single",)),
    "prefill: a large scale in 8 bits, a query without keys": PrefillCase(
        dtype="e4m3", ends_q=(0, 2), tokens_q=2, softmax_scale=2.0**10, magnitude=2.0**2, extreme=True
    ),
    "prefill: a large scale in 8 bits, one key": PrefillCase(
        dtype="e5m2", ends_q=(0, 2), tokens_q=2, causal=False, lse=False, softmax_scale=2.0**10, magnitude=2.0**2,
        extreme=True,
    ),
    "prefill: a large scale": PrefillCase(dtype="fp16", softmax_scale=2.0**10, magnitude=2.0**3, extreme=True),
    "prefill: a pack that starts before its tensor": PrefillCase(ends_q=(-1, 1), ends_kv=(-(2**31), 0), tokens_kv=0),
    "prefill: ends beyond the pack, in no order": PrefillCase(
        dtype="e5m2", ends_q=(0, 4, 8), ends_kv=(3086, 512, 2**31 - 1), tokens_q=8, tokens_kv=527
    ),
    "prefill: merged outputs below float32's normal numbers": PrefillCase(
        d_qk=256, ends_q=(0, 4), ends_kv=(0, 2), tokens_q=4, tokens_kv=2, pdl=True, softmax_scale=2.0, values="opposed",
        magnitude=0.5, layouts=("contiguous", "slices", "slices"), sinks=(2.0,), extreme=True, merges=True,
    ),
    "prefill: a list of tiles that are all partial": PrefillCase(
        dtype="e4m3", d_qk=128, ends_q=(0, 1), causal=False, mask="random"
    ),
    "read_cache: one scale, whose stride means nothing": CacheCase(
        "read_cache", "snapmla", slots=(-1,), row_gap=3, rounded=False
    ),
    "prefill: a batch size that is no number": Refusal(PrefillCase(), "batch_size", "value", 1),
    "decode: a query token that may see no key, which is NaN": DecodeCase(page=16, visible=((0,),)),
    "decode: fewer parts than row tiles of a request of a pack": DecodeCase(
        dtype="e5m2", seq_lens=(0, 0, 0), q_len=8, heads=65, page=16, lse=False, ends_q=(0, 0, 0, 7), tokens=7
    ),
    "decode: a warp that asks barriers in turn, while one that they wait for starves": DecodeCase(
        rope=0, seq_lens=(990, 324, 27), page=2, width=502, shared=2, lse=False, processors=16,
        schedule=Schedule(quantum=1, races=False, starved=(13,)),
    ),
    "decode by FlashMLA's name: a workspace with room for a part less than the formula's": FaceCase(
        call=DecodeCase(dtype="e4m3", rope=0, seq_lens=(0, 129, 1), q_len=8, page=16, width=9, lse_base=math.e,
                        processors=2),
        face="flash_mla",
    ),
    "decode: keys between those that tokens see, which are NaN": DecodeCase(
        seq_lens=(100,), q_len=3, visible=((95, 0, 100),), sight=Sight(window_left=5)
    ),
    "decode: keys that no token of a row tile sees, which are NaN": DecodeCase(
        seq_lens=(300, 40), q_len=4, heads=40, page=16, visible=((17, 0, 200, -5), (0, 0, 0, 0))
    ),
    "decode: pages of few keys that the cache does not have": DecodeCase(
        seq_lens=(40,), page=4, width=10, heads=4, missing=((0, 2, -1), (0, 5, 70))
    ),
    "decode: a page of a cache of two tensors that it does not have": DecodeCase(
        seq_lens=(40,), page=16, apart=True, width=3, heads=4, missing=((0, 1, -1),)
    ),
    "decode: more keys than the page table has": DecodeCase(seq_lens=(5000,), heads=65, page=16),
    "decode: far more keys than the page table has, and a window": DecodeCase(
        seq_lens=(262145,), page=32, sight=Sight(window_left=0)
    ),
    "decode: the largest window, and more query tokens than keys": DecodeCase(
        q_len=3, heads=5, page=16, sight=Sight(window_left=2**31 - 1)
    ),
    "decode: the least visible lengths": DecodeCase(
        seq_lens=(-(2**31), 0, 1), page=16, visible=((-(2**31),), (-(2**31),), (-(2**31),)), processors=2
    ),
    "decode: the largest length and window": DecodeCase(
        dtype="e4m3", seq_lens=(2**31 - 1,), heads=65, page=16, sight=Sight(window_left=2**31 - 1), processors=2
    ),
    "decode: a length of 63 bits": DecodeCase(seq_lens=(2**63 - 1,), page=16, wide_lengths=True),
    "decode: lengths and pages below 0": DecodeCase(
        seq_lens=(1, -(2**31)), heads=65, page=16, missing=((0, 0, -(2**31)),)
    ),
    "decode: a large scale, a query token without keys": DecodeCase(
        q_len=2, softmax_scale=2.0**10, magnitude=2.0**2, extreme=True
    ),
    "decode: the least scale": DecodeCase(softmax_scale=2.0**-126, magnitude=2.0**50, extreme=True),
    "decode: every score below -1e30": DecodeCase(
        softmax_scale=2.0**-86, magnitude=2.0**49, values="opposed", extreme=True
    ),
    "decode: one key, whose four scales are nothing beside its score": DecodeCase(
        rows="fp8_ds_mla", width=5, softmax_scale=2.0, values="opposed", magnitude=32.0, processors=2, extreme=True
    ),
    "decode: a sink of -1e30 and no key": DecodeCase(
        dtype="fp16", q_len=2, sinks=(-1e30,), lse_includes_sink=True, extreme=True
    ),
    "decode: a large scale": DecodeCase(dtype="fp16", softmax_scale=2.0**10, magnitude=2.0**3, extreme=True),
    "decode: scores of one sign, of which 8-bit tensor cores cut off much": DecodeCase(
        dtype="e4m3", heads=16, width=5, softmax_scale=1.0, values="opposed", magnitude=0.25, processors=2,
        extreme=True, schedule=Schedule(sums=True),
    ),
    **{
        f"decode: values of one sign, whose sums lose what is small, {rows or dtype}": DecodeCase(
            dtype=dtype, rows=rows, seq_lens=(640,), heads=24, width=10, values="one sign", processors=2,
            schedule=Schedule(sums=True),
        )
        for dtype, rows in (("bf16", None), ("e4m3", None), ("e4m3", "snapmla"))
    },
    "decode: a first key that its scale of 0 hides, before others of 4 and more": DecodeCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(exponent=30, special=((0, 0, 0.0),)), seq_lens=(70,), width=2
    ),
    "decode: one key with a scale beside it, whose score is above 2^20": DecodeCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(factors="an outlier"), seq_lens=(1, 257), heads=2, width=5,
        softmax_scale=1.0, magnitude=64.0, extreme=True
    ),
    **{
        f"decode: visible lengths, and more SMs than work, {rows or dtype}, {heads} heads": DecodeCase(
            dtype=dtype, rows=rows, heads=heads, visible=((1,),), seq_lens=(0,), lse=False, processors=132
        )
        for dtype, rows in (("bf16", None), ("e4m3", None), ("bf16", "fp8_ds_mla"), ("e4m3", "snapmla"))
        for heads in (8, 65, 128)
    },
    "decode of chosen keys: one length for the tokens of one request": ChosenCase(
        shape=(1, 3), pages=1, top_k=9, lengths=(5,), by_request=True
    ),
    "decode of chosen keys: rows with a scale each, the first of which are in no tile": ChosenCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(factors="spread", exponent=-60), shape=(2,), heads=17, top_k=200,
        front=130, page=61, pages=7, outside=5,
    ),
    "decode of chosen keys: rows with a scale each, one of which is NaN": ChosenCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(special=((1, 3, math.nan),)), shape=(3,), heads=8, top_k=70,
        pages=20,
    ),
    **{
        f"decode of chosen keys: rows with scales far apart beside sinks, {len(sinks)} heads, seed {seed}": ChosenCase(
            dtype="e4m3", rows="snapmla", scaling=Scaling(factors="far apart"), heads=len(sinks), page=1, top_k=156,
            softmax_scale=0.041666666666666664, processors=2, sinks=sinks, seed=seed,
        )
        for sinks, seed in (
            ((60.0,), 220),
            ((60.0, 40.0, 20.0, 80.0, 0.0, 40.0, 40.0, 60.0, 60.0, 40.0, 0.0, 0.0, 80.0, 70.0, 40.0, 20.0), 6997),
            ((60.0, 80.0) * 40, 220),
        )
    },
    "decode of chosen keys: a sink's share times the output's scale has few bits left": ChosenCase(
        dtype="e4m3", shape=(1, 3), pages=1, page=1, rope=0, top_k=128, lse=False,
        softmax_scale=0.041666666666666664, output_scale=0.001, values="one heavy key", magnitude=6.0, processors=2,
        sinks=(0.0,), seed=3,
    ),
    "sparse prefill: pages of one key, whose three tensors were taken for rows": ChosenCase(
        dtype="e4m3", rows="snapmla", shape=(1,), pages=1, page=1, top_k=0, prefill=True, lse=False,
        softmax_scale=0.041666666666666664, processors=2,
    ),
    "decode by faces: a plan of equal query lengths in the place of another": FaceCase(
        DecodeCase(seq_lens=(0, 193), q_len=64, page=16, width=13, ends_q=(0, 64, 128), tokens=128), "wrapper",
        again=True,
    ),
    "decode by faces: a table without columns, planned again": FaceCase(
        DecodeCase(dtype="fp16", seq_lens=(0,), heads=65, page=16, width=0), "wrapper", again=True
    ),
    "decode by faces: no query tokens, planned again": FaceCase(
        DecodeCase(dtype="e4m3", seq_lens=(), heads=65, page=16, width=0, ends_q=(0,)), "wrapper", again=True
    ),
    "write_cache: 32-bit slots at an odd address": CacheCase(narrow=True, offset=1),
    "decode: a wrong bf16 query for rows with a scale each": Refusal(
        DecodeCase(dtype="e4m3", rows="snapmla", scaling=Scaling(quantised=False)), "query", "gap"
    ),
    "decode: no query beside scales that are one for all heads": Refusal(
        DecodeCase(dtype="e4m3", rows="snapmla", heads=2, scaling=Scaling(query_scales="one for all heads")),
        "query[0]", "value", 1,
    ),
    "decode: a cache of three that are none, of rows without rope": Refusal(
        DecodeCase(rope=0, seq_lens=(5, 20, 1), q_len=2, heads=2, page=16, width=4), "kv_cache", "value", 6
    ),
}  # fmt: skip


def runs_on(case: Case, arch: str) -> bool:
    variant = case.variant(arch)
    return tsmla.why_unsupported(variant) is None and has_a_text_of_its_own(variant)


@pytest.mark.parametrize("name, arch", [(name, arch) for name in FOUND for arch in ARCHS if runs_on(FOUND[name], arch)])
def test_found_case(name, arch):
    check(FOUND[name], Place(arch))


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_a_case_is_its_repr(case):
    assert repr(case_of(repr(case))) == repr(case)
