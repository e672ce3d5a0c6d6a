"""mla_write_cache and mla_read_cache without a GPU: what they accept, what they say about the rest, and what they
launch.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from cache_rows import WIDTHS, element_of
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from tsmla import ArgumentError, UnsupportedError, mla_read_cache, mla_write_cache
from tsmla.identity.arch import Arch
from tsmla.identity.call import READ_CACHE, WRITE_CACHE
from tsmla.identity.row_format import ROWS
from tsmla.identity.support import CACHE_DTYPES
from tsmla.identity.variant import Dtype, ReadCacheVariant, WriteCacheVariant
from tsmla.loading import resolve

TOKENS, PAGES, PAGE = 5, 4, 24
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OPERATORS = {"write": mla_write_cache, "read": mla_read_cache}


def cache_of(format: str) -> dict[str, torch.Tensor]:
    """The tensors of a cache, zeros."""
    found = {}
    for name, width in WIDTHS[format].items():
        rows = torch.zeros(PAGES, PAGE, width, dtype=torch.uint8).view(element_of(format, name))
        found[name] = rows[..., 0] if name == "scale_cache" else rows
    return found


def call(verb: str, format: str = "fp8_ds_mla", dtype: torch.dtype = BF16) -> dict:
    """A right call."""
    rows = {"kv_c": torch.zeros(TOKENS, 512, dtype=dtype), "k_pe": torch.zeros(TOKENS, 64, dtype=dtype)}
    if not ROWS[format].has("rope"):
        rows["k_pe"] = None
    slots = {"slot_mapping" if verb == "write" else "indices": torch.arange(TOKENS)}
    return {**rows, **slots, **cache_of(format), "format": format}


def by_tables() -> dict:
    """A right read by page tables."""
    given = call("read")
    del given["indices"]
    tables = {"block_tables": (2, 3), "cum_seq_lens": (3,), "seq_starts": (2,)}
    return {**given, **{name: torch.zeros(shape, dtype=torch.int32) for name, shape in tables.items()}}


@pytest.mark.parametrize("verb, kind", [("write", WriteCacheVariant), ("read", ReadCacheVariant)])
@pytest.mark.parametrize("format", ROWS)
def test_the_variant_follows_the_arguments(recorder, format, verb, kind):
    for name in CACHE_DTYPES[format]:
        dtype = {Dtype.BF16: BF16, Dtype.FP16: torch.float16}[name]
        OPERATORS[verb](**call(verb, format, dtype))
        assert recorder.variants.pop() == kind(Arch.SM90A, name, ROWS[format])


def test_bytes_stand_for_elements_of_eight_bits(recorder):
    for format in ("e4m3", "fp8_ds_mla", "snapmla"):
        for verb, operator in OPERATORS.items():
            given = call(verb, format)
            cache = given["cache"].view(torch.uint8)
            for dtype in (torch.uint8, E4M3):
                operator(**{**given, "cache": cache.view(dtype)})
                launched = recorder.launches[-1][3 if verb == "write" else 2]
                assert launched.dtype == E4M3 and launched.data_ptr() == cache.data_ptr()


def test_slots_of_32_bits_are_widened(recorder):
    for verb, name in (("write", "slot_mapping"), ("read", "indices")):
        slots = torch.tensor([3, -1, 2**31 - 1, -(2**31), 0], dtype=torch.int32)
        OPERATORS[verb](**{**call(verb), name: slots})
        given = [x for x in recorder.launches[-1] if isinstance(x, torch.Tensor)]
        (got,) = (x for x in given if x.dtype == torch.int64 and x.numel())
        assert torch.equal(got, slots.long())


@pytest.mark.parametrize("format, asked, expected", [
    ("snapmla", None, 1), ("snapmla", False, 0), ("snapmla", True, 1),
    ("fp8_ds_mla", None, 0), ("fp8_ds_mla", True, 1), ("bf16", None, 0), ("e4m3", None, 0),
])  # fmt: skip
def test_when_scales_are_powers_of_two(recorder, format, asked, expected):
    mla_write_cache(**call("write", format), power_of_two_scales=asked, enable_pdl=True)
    assert recorder.launches[-1][-4:] == (1.0, expected, 0, 1)


def test_a_rope_part_of_one_head(recorder):
    for verb, operator in OPERATORS.items():
        given = call(verb)
        operator(**{**given, "k_pe": given["k_pe"][:, None]})
        assert recorder.launches[-1][1].shape == (TOKENS, 64)


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for verb, operator in OPERATORS.items():
        for count in (2, 7):
            given = call(verb, "e4m3")
            for name in ("kv_c", "k_pe", "slot_mapping", "indices"):
                if name in given:
                    given[name] = torch.zeros((count, *given[name].shape[1:]), dtype=given[name].dtype)
            operator(**given, scale=float(count))
        assert len(recorder.variants) == 1
        resolve.forget()
        recorder.variants.clear()


@pytest.mark.parametrize("verb", OPERATORS)
def test_nothing_to_do_launches_nothing(recorder, verb):
    given = call(verb)
    empty = {name: given[name][:0] for name in ("kv_c", "k_pe", "slot_mapping", "indices") if name in given}
    OPERATORS[verb](**{**given, **empty})
    assert recorder.launches == []
    with pytest.raises(ArgumentError, match="cache has shape"):
        OPERATORS[verb](**{**given, **empty, "cache": given["cache"][..., 1:]})


def test_caches_lie_as_they_like(recorder):
    """Pages and rows apart, one page or one row with strides that mean nothing, no pages."""
    whole = torch.zeros(PAGES, PAGE + 1, 672, dtype=torch.uint8)
    odd = torch.zeros(700, dtype=torch.uint8).as_strided((1, 1, 656), (3, 5, 1))
    for cache in (whole[:, :PAGE, :656], whole.transpose(0, 1)[..., 16:672], odd, whole[:0, :, :656]):
        mla_write_cache(**{**call("write"), "cache": cache})
        assert recorder.launches[-1][3].stride() == cache.stride()


WRONG = {
    "a format that is none": ({"format": "fp8"}, r"format is 'fp8'; accepted: bf16, fp16, e4m3, fp8_ds_mla, snapmla"),
    "a format that is no word": ({"format": 3}, "format is 3; accepted: bf16"),
    "another format": ({"format": "bf16"}, r"cache is torch.float8_e4m3fn; accepted: torch.bfloat16"),
    "another width": ({"format": "e4m3"}, r"cache has shape \[4, 24, 656\]; it must be \[pages, page_size, 576\]"),
    "a format of three tensors": (
        {"format": "snapmla"},
        "rope_cache is not given; snapmla rows lie in cache, rope_cache and scale_cache",
    ),
    "a rope cache": (
        {"rope_cache": torch.zeros(PAGES, PAGE, 64)},
        "rope_cache is given; fp8_ds_mla rows lie in cache alone",
    ),
    "scales": ({"scale_cache": torch.zeros(PAGES, PAGE)}, "scale_cache is given; fp8_ds_mla rows lie in cache alone"),
    "a scale of the cache": ({"scale": 0.5}, "scale is 0.5; it must be 1, because a cache of fp8_ds_mla rows has none"),
    "a scale on the device": ({"scale": torch.ones(())}, "scale is a Tensor; it must be a Python number"),
    "a flag in words": ({"enable_pdl": "no"}, "enable_pdl is 'no'; it must be True or False"),
    "a cache of one dimension": ({"cache": torch.zeros(656, dtype=torch.uint8)}, r"cache has shape \[656\]; it must"),
    "no cache": ({"cache": None}, "cache is a NoneType; it must be a tensor"),
    "a cache of integers": ({"cache": torch.zeros(4, 16, 656, dtype=torch.int8)}, "cache is torch.int8; accepted: "),
    "rows with odd pitch": (
        {"cache": torch.zeros(4, 16, 660, dtype=torch.uint8)[..., :656]},
        r"cache has strides \(10560, 660, 1\) of 1-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "a cache in the middle of 16 bytes": (
        {"cache": torch.zeros(4, 16, 672, dtype=torch.uint8)[..., 8:664]},
        "cache starts at address 0x[0-9a-f]+8",
    ),
    "a cache too large": (
        {"cache": torch.zeros(1, 1, 656, dtype=torch.uint8).expand(2**16, 2**16, 656)},
        "cache has 65536 pages of 65536 rows; at most 2147483647 rows fit a cache|cache has shape .* share memory",
    ),
    "a rope part of other tokens": ({"k_pe": torch.zeros(6, 64, dtype=BF16)}, r"k_pe has shape \[6, 64\]; it must be"),
    "a rope part of another dtype": ({"k_pe": torch.zeros(5, 64)}, "k_pe is torch.float32; accepted: torch.bfloat16"),
    "rows of another width": ({"kv_c": torch.zeros(5, 576, dtype=BF16)}, r"kv_c has shape \[5, 576\]; it must be"),
    "rows of float32": ({"kv_c": torch.zeros(5, 512)}, "kv_c is torch.float32; accepted: torch.bfloat16"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("verb", OPERATORS)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(recorder, case, verb, seen):
    change, message = WRONG[case]
    if seen:
        OPERATORS[verb](**call(verb))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^mla_{verb}_cache: ({message})"):
        OPERATORS[verb](**{**call(verb), **change})
    assert recorder.launches == []


def test_what_only_a_write_can_have_wrong(recorder):
    for change, message in (
        ({"slot_mapping": torch.arange(4)}, r"slot_mapping has shape \[4\]; it must be \[5\]"),
        ({"slot_mapping": torch.zeros(5)}, "slot_mapping is torch.float32; accepted: torch.int64, torch.int32"),
        ({"slot_mapping": torch.arange(10)[::2]}, r"slot_mapping has shape .* strides \(2,\); it must be contig"),
        ({"power_of_two_scales": "yes"}, "power_of_two_scales is 'yes'; it must be True or False"),
    ):
        with pytest.raises(ArgumentError, match=f"^mla_write_cache: {message}"):
            mla_write_cache(**{**call("write"), **change})
    with pytest.raises(ArgumentError, match="power_of_two_scales is False; it must be None, because e4m3 rows have no"):
        mla_write_cache(**call("write", "e4m3"), power_of_two_scales=False)
    assert recorder.launches == []


def rotating(dtype: torch.dtype = BF16, positions: torch.dtype = torch.int64) -> dict:
    """A right write that rotates rope parts."""
    turns = {"positions": torch.arange(TOKENS, dtype=positions), "cos_sin_cache": torch.randn(9, 64).to(dtype)}
    return {**call("write"), **turns, "rope_interleaved": False}


@pytest.mark.parametrize("dtype, width", [(BF16, 32), (torch.float32, 64)])
def test_what_rotates_rope_parts(recorder, dtype, width):
    """A table in words of 32 bits, at the address where it lies; positions of 64 bits."""
    for positions in (torch.int64, torch.int32):
        for interleaved in (True, False):
            given = {**rotating(dtype, positions), "rope_interleaved": interleaved}
            mla_write_cache(**given)
            *_, got, table, _, _, flag, _ = recorder.launches[-1]
            assert torch.equal(got, given["positions"].long()) and flag == int(interleaved)
            assert table.shape == (9, width) and table.data_ptr() == given["cos_sin_cache"].data_ptr()
    mla_write_cache(**call("write"))
    *_, got, table, _, _, flag, _ = recorder.launches[-1]
    assert got.shape == (0,) and table.shape == (0, 64) and flag == 0


TURNS = {
    "no table": ({"cos_sin_cache": None}, "cos_sin_cache is not given; it goes with positions"),
    "no positions": ({"positions": None}, "positions is not given; it goes with cos_sin_cache"),
    "no pairs": ({"rope_interleaved": None}, "rope_interleaved is not given; it goes with positions"),
    "pairs in words": ({"rope_interleaved": "yes"}, "rope_interleaved is 'yes'; it must be True or False"),
    "other tokens": ({"positions": torch.arange(6)}, r"positions has shape \[6\]; it must be \[5\]"),
    "positions of floats": ({"positions": torch.zeros(5)}, "positions is torch.float32; accepted: torch.int64, torch."),
    "a narrow table": (
        {"cos_sin_cache": torch.zeros(9, 32)},
        r"cos_sin_cache has shape \[9, 32\]; it must be \[max_positions, 64\]",
    ),
    "a table of fp16": (
        {"cos_sin_cache": torch.zeros(9, 64).half()},
        "cos_sin_cache is torch.float16; accepted: torch.float32",
    ),
    "a table with odd pitch": (
        {"cos_sin_cache": torch.zeros(9, 66, dtype=BF16)[:, :64]},
        r"cos_sin_cache has strides \(66, 1\) of 2-byte",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", TURNS)
def test_what_rotates_wrongly_is_named(recorder, case, seen):
    change, message = TURNS[case]
    if seen:
        mla_write_cache(**rotating())
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^mla_write_cache: {message}"):
        mla_write_cache(**{**rotating(), **change})
    assert recorder.launches == []


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-39, math.inf, math.nan])
def test_a_scale_that_is_none(recorder, scale):
    for verb, operator in OPERATORS.items():
        with pytest.raises(ArgumentError, match=r"scale is .*; it must be from 1.18e-38 \(the smallest normal"):
            operator(**call(verb, "e4m3"), scale=scale)


def test_a_dtype_without_a_kernel(recorder):
    for verb, how in (("write", "written from"), ("read", "read as")):
        with pytest.raises(UnsupportedError, match=f"rope bf16 64 is {how} bf16, not fp16"):
            OPERATORS[verb](**call(verb, "fp8_ds_mla", torch.float16))


READS = {
    "both ways": ({"indices": torch.arange(5)}, "indices and block_tables are given; rows are told by one of them"),
    "tables alone": ({"cum_seq_lens": None}, "cum_seq_lens is not given; it goes with block_tables"),
    "lengths alone": ({"block_tables": None}, "block_tables is not given; it goes with cum_seq_lens"),
    "neither": (
        {"block_tables": None, "cum_seq_lens": None, "seq_starts": None},
        "indices is not given; it must be, or block_tables and cum_seq_lens",
    ),
    "lengths of other requests": (
        {"cum_seq_lens": torch.zeros(4, dtype=torch.int32)},
        r"cum_seq_lens has shape \[4\]; it must be \[3\]",
    ),
    "starts of other requests": (
        {"seq_starts": torch.zeros(3, dtype=torch.int32)},
        r"seq_starts has shape \[3\]; it must be \[2\]",
    ),
    "lengths of 64 bits": ({"cum_seq_lens": torch.zeros(3, dtype=torch.int64)}, "cum_seq_lens is torch.int64; acc"),
    "tables with gaps": (
        {"block_tables": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
        r"block_tables has strides \(6, 2\); its last",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", READS)
def test_places_that_are_wrong_are_named(recorder, case, seen):
    change, message = READS[case]
    if seen:
        mla_read_cache(**by_tables())
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^mla_read_cache: {message}"):
        mla_read_cache(**{**by_tables(), **change})
    assert recorder.launches == []


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("name", ["kv_c", "k_pe", "cache", "rope_cache", "scale_cache"])
@pytest.mark.parametrize("case", [*ODD, *FLOATS_ONLY])
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name, seen):
    make, message = {**ODD, **FLOATS_ONLY}[case]
    for verb, operator in OPERATORS.items():
        given = call(verb, "snapmla")
        changed = {**given, name: make(given[name])}
        if seen:
            operator(**given)
            recorder.launches.clear()
        named = name
        if seen and case == "fake":
            changed = {n: make(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            named = "kv_c"
        with pytest.raises(ArgumentError, match=f"^mla_{verb}_cache: {named} {message.format(name=named)}"):
            operator(**changed)
        assert recorder.launches == []


@pytest.mark.parametrize("case", OVERLAPPING)
def test_what_is_written_shares_no_memory(recorder, case):
    for verb, names in (("write", ("cache", "rope_cache", "scale_cache")), ("read", ("kv_c", "k_pe"))):
        given = call(verb, "snapmla")
        for name in names:
            OPERATORS[verb](**given)
            recorder.launches.clear()
            with pytest.raises(ArgumentError, match=f": {name} has shape .* so some of its elements share memory"):
                OPERATORS[verb](**{**given, name: OVERLAPPING[case](given[name])})
            assert recorder.launches == []


def test_cpu_tensors_are_refused():
    for verb, operator in OPERATORS.items():
        with pytest.raises(ArgumentError, match=f"mla_{verb}_cache: kv_c is on cpu; it must be a CUDA tensor"):
            operator(**call(verb))


@pytest.mark.parametrize("verb", OPERATORS)
@pytest.mark.parametrize("format", ["latent_bf16", "latent_e4m3"])
def test_rows_without_a_rope_piece(recorder, verb, format):
    """k_pe is None, as is whatever else concerns it; other formats want it."""
    given = call(verb, format)
    OPERATORS[verb](**given)
    table = {"write": WRITE_CACHE, "read": READ_CACHE}[verb]
    names = dict(zip((x.name for x in table.arguments), recorder.launches[-1], strict=True))
    absent = {x.name for x in table.given if x.piece}
    assert "k_pe" in absent and {name for name in absent if names[name] is not None} == set()
    for _ in range(2):
        with pytest.raises(ArgumentError, match="k_pe is given; rows of latent .* 512 have no rope piece"):
            OPERATORS[verb](**given | {"k_pe": torch.zeros(TOKENS, 64, dtype=BF16)})
        with pytest.raises(ArgumentError, match="k_pe is a NoneType; it must be"):
            OPERATORS[verb](**call(verb) | {"k_pe": None})
        OPERATORS[verb](**given)
    with pytest.raises(ArgumentError, match="scale is 2.0; it must be 1") if format == "latent_bf16" else nullcontext():
        OPERATORS[verb](**given, scale=2.0)


def test_a_rotation_of_rows_without_a_rope_piece(recorder):
    table = {"positions": torch.zeros(TOKENS, dtype=torch.int64), "cos_sin_cache": torch.zeros(3, 64)}
    with pytest.raises(ArgumentError, match="positions is given; rows of latent bf16 512 have no rope piece"):
        mla_write_cache(**call("write", "latent_bf16"), **table, rope_interleaved=True)
