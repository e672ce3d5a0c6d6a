"""tokenspeed_mla's face: what it launches is what the operators called directly launch, where their words agree."""

from __future__ import annotations

import decode_calls
import other_facts
import pytest
import torch
import tsmla
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from launches import ROOM, SMS, alike, distinct, launched, processors
from refusing import Recorder
from tsmla import ArgumentError, UnsupportedError
from tsmla.compat import tokenspeed_mla
from tsmla.compat.tokenspeed_mla import tokenspeed_mla_decode, tokenspeed_mla_prefill
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PrefillVariant
from tsmla.loading import resolve
from tsmla.operators import prepare
from tsmla.operators.decode import tsmla_decode
from tsmla.operators.prefill import tsmla_prefill

BATCH, Q_LEN, HEADS, PAGES, PAGE, WIDTH = 3, 2, 4, 10, 32, 6
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode_inputs(q_len: int = Q_LEN, dtype: torch.dtype = torch.bfloat16, **changes) -> dict:
    given = {
        "query": distinct(BATCH, q_len, HEADS, 576, dtype=dtype),
        "kv_cache": distinct(PAGES, PAGE, 576, dtype=dtype),
        "workspace_buffer": ROOM[: SMS * HEADS * 8 * 513 * 4],
        "block_tables": torch.arange(BATCH * WIDTH, dtype=torch.int32).view(BATCH, WIDTH) % PAGES,
        "seq_lens": ints(1, 100, 0),
        "max_seq_len": 150,
    }
    return decode_calls.inputs(**{**given, **changes})


some_decode = {
    "q_len": some.integers(1, 3),
    "dtype": some.sampled_from([torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    "options": some.fixed_dictionaries(
        {},
        optional={
            "output_scale": some.floats(-2.0, 2.0),
            "is_var_seq": some.booleans(),
            "window_left": some.integers(-1, 200),
            "enable_pdl": some.booleans(),
            "return_lse": some.booleans(),
            "causal_seqs": some.just(ints(7, 300, 2)),
            "min_split_kv": some.integers(1, 256),
        },
    ),
    "ranks": some.sampled_from([{}, {"cp_world": 2, "cp_rank": 1, "cp_interleave_size": 16}]),
    "causal": some.booleans(),
}


@many
@given(**some_decode)
def test_decode_launches_what_the_operator_does(recorder, q_len, dtype, options, ranks, causal):
    if ranks:
        options = {**options, **ranks, "causal_seqs": ints(7, 300, 2)}
    if not causal and q_len > 1:
        options.pop("window_left", None)
    face = decode_inputs(q_len, dtype, **options, causal_mask=causal)
    operator = {name: value for name, value in face.items() if name not in ("is_var_seq", "min_split_kv")}
    result, got, variant = launched(recorder, lambda: tokenspeed_mla_decode(**face))
    wanted, want, wanted_variant = launched(recorder, lambda: tsmla_decode(**operator))
    assert variant == wanted_variant and isinstance(result, tuple) == isinstance(wanted, tuple)
    alike(got, want)


@many
@given(lens=some.lists(some.integers(0, 200), min_size=BATCH * Q_LEN, max_size=BATCH * Q_LEN), causal=some.booleans())
def test_visible_lengths_take_the_place_of_the_causal_bound(recorder, lens, causal):
    """In tokenspeed_mla; in tsmla_decode the least bound holds, so there must be no causal one."""
    visible = ints(*lens).view(BATCH, Q_LEN)
    face = decode_inputs(local_visible_lens=visible)
    _, got, _ = launched(recorder, lambda: tokenspeed_mla_decode(**face, causal_mask=causal))
    _, want, _ = launched(recorder, lambda: tsmla_decode(**face, causal_mask=False))
    alike(got, want)


def test_the_fourteenth_argument_may_be_enable_pdl(recorder):
    """Release 0.1.3 has it there."""
    arguments = [*decode_inputs().values(), 1.0, None, True, True]
    for pdl in (False, True):
        _, got, _ = launched(recorder, lambda pdl=pdl: tokenspeed_mla_decode(*arguments, pdl))
        assert got["pdl"] == pdl and got["window_left"] == -1
    _, got, _ = launched(recorder, lambda: tokenspeed_mla_decode(*arguments, 7, True))
    assert got["pdl"] == 1 and got["window_left"] == 7
    with pytest.raises(ArgumentError, match="window_left is True; it must be an integer"):
        tokenspeed_mla_decode(*arguments, True, True)


@pytest.mark.parametrize("width", [640, 577])
def test_strided_queries_are_copied_where_they_must_be(recorder, width):
    wide = distinct(BATCH, Q_LEN, HEADS, width)[..., :576]
    _, got, _ = launched(recorder, lambda: tokenspeed_mla_decode(**decode_inputs(query=wide)))
    assert (got["query"].data_ptr() == wide.data_ptr()) == (width % 8 == 0) and torch.equal(got["query"], wide)


BOTH = torch.zeros(BATCH, Q_LEN, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_left": 5, "causal_mask": False}, "window_left is 5 with causal_mask=False and 2 query tokens"),
        ({"window_left": 5, "local_visible_lens": BOTH}, "local_visible_lens is given, which excludes window_left"),
        ({"causal_seqs": ints(1, 2, 3), "local_visible_lens": BOTH}, "local_visible_lens .* causal_seqs"),
        ({"cp_world": 2, "local_visible_lens": BOTH}, "local_visible_lens .* cp_world"),
        ({"min_split_kv": 0}, "min_split_kv is 0; it must be from 1 to 256"),
        ({"min_split_kv": 257}, "min_split_kv is 257"),
        ({"is_var_seq": None}, "is_var_seq is a NoneType"),
        ({"window_left": -2}, "window_left is -2"),
        ({"window_left": None}, "window_left is a NoneType"),
        ({"query": None}, "query is a NoneType"),
        ({"query": distinct(BATCH, HEADS, 576)}, "query has shape"),
        ({"cp_world": 2}, "cp_world is 2 but causal_seqs is not given"),
        ({"out": torch.zeros(BATCH, Q_LEN, HEADS, 512).to(torch.float8_e4m3fn)}, "out is torch.float8_e4m3fn"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"workspace_buffer": torch.zeros(8, dtype=torch.float32)}, "workspace_buffer is torch.float32"),
        ({"kv_lora_rank": 256}, "kv_lora_rank and qk_rope_head_dim are 256 and 64"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_decode_refuses_by_name(recorder, changes, text):
    with pytest.raises(ArgumentError, match=text):
        tokenspeed_mla_decode(**decode_inputs(**changes))
    assert not recorder.launches


def test_windows_of_one_token_may_be_full(recorder):
    """Then a window's start and end move together."""
    face = decode_inputs(1, window_left=5, causal_mask=False)
    _, got, _ = launched(recorder, lambda: tokenspeed_mla_decode(**face))
    _, want, _ = launched(recorder, lambda: tsmla_decode(**face))
    alike(got, want)


def prefill_inputs(dtype: torch.dtype = torch.bfloat16, d_qk: int = 192, **changes) -> dict:
    both = distinct(20, 4, d_qk + 128, dtype=dtype)
    given = {
        "query": distinct(12, 8, d_qk, dtype=dtype),
        "key": both[..., :d_qk],
        "value": both[..., d_qk:],
        "seq_lens": ints(15, 5),
        "cum_seq_lens": ints(0, 15, 20),
        "max_seq_len": 15,
        "batch_size": 2,
        "softmax_scale": 0.0721,
        "cum_seq_lens_q": ints(0, 10, 12),
        "max_seq_len_q": 10,
    }
    return {**given, **changes}


@many
@given(
    dtype=some.sampled_from([torch.bfloat16, torch.float8_e4m3fn]),
    d_qk=some.sampled_from([192, 128]),
    options=some.fixed_dictionaries(
        {},
        optional={
            "is_causal": some.booleans(),
            "return_lse": some.booleans(),
            "enable_pdl": some.booleans(),
            "out": some.just(torch.zeros(12, 8, 128, dtype=torch.bfloat16)),
            "seq_lens": some.none(),
        },
    ),
    lengths=some.sampled_from([torch.int32, torch.int64]),
)
def test_prefill_launches_what_the_operator_does(recorder, dtype, d_qk, options, lengths):
    face = prefill_inputs(dtype, d_qk, **options)
    operator = dict(face)
    for name in ("cum_seq_lens", "cum_seq_lens_q"):
        face[name] = face[name].to(lengths)
    result, got, variant = launched(recorder, lambda: tokenspeed_mla_prefill(**face))
    _, want, wanted_variant = launched(recorder, lambda: tsmla_prefill(**operator))
    assert variant == wanted_variant and variant.out_dtype is Dtype.BF16
    assert isinstance(result, tuple) == options.get("return_lse", False)
    alike(got, want)


def test_prefill_without_lengths_of_queries(recorder):
    face = prefill_inputs(query=distinct(20, 8, 192), cum_seq_lens_q=None, max_seq_len_q=None)
    _, got, _ = launched(recorder, lambda: tokenspeed_mla_prefill(**face))
    assert got["cum_seq_lens_q"] is got["cum_seq_lens_kv"] is face["cum_seq_lens"]


def test_prefill_of_fp16_writes_bf16_where_there_is_such_a_kernel(recorder, monkeypatch):
    with monkeypatch.context() as patched:
        other_facts.change(patched, Arch.SM90A, prefill={**Arch.SM90A.facts.prefill, Dtype.FP16: (Dtype.FP16,)})
        with pytest.raises(UnsupportedError, match="prefill of fp16 for sm_90a writes fp16, not bf16"):
            tokenspeed_mla_prefill(**prefill_inputs(torch.float16))
    out = tokenspeed_mla_prefill(**prefill_inputs(torch.float16))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"out": torch.zeros(12, 8, 128, dtype=torch.float16)}, "out_dtype is torch.bfloat16 but out is torch.float16"),
        ({"cum_seq_lens": None}, "cum_seq_lens is a NoneType"),
        ({"cum_seq_lens": torch.zeros(3)}, "cum_seq_lens is torch.float32"),
        ({"cum_seq_lens": ints(0, 1)}, r"cum_seq_lens has shape \[2\]"),
        ({"query": None}, "query is a NoneType"),
        ({"key": distinct(20, 3, 192), "value": distinct(20, 3, 128)}, "query has 8 heads and key 3"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_prefill_refuses_by_name(recorder, changes, text):
    with pytest.raises(ArgumentError, match=text):
        tokenspeed_mla_prefill(**prefill_inputs(**changes))
    assert not recorder.launches


def test_pack_is_the_operator():
    assert tokenspeed_mla.mla_kv_pack_quantize_fp8 is tsmla.mla_kv_pack_quantize_fp8


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_warmup_loads_what_tokenspeed_s_does(recorder, monkeypatch, q_dtype):
    """Causal and full, with LSE."""
    warmed: list = []
    monkeypatch.setattr(prepare, "warmup", warmed.extend)
    assert tokenspeed_mla.warmup_compile_prefill(q_dtype=q_dtype, enable_pdl=True) is None
    dtype = tsmla.operators.checks.TORCH_DTYPES[q_dtype]
    assert warmed == [PrefillVariant(Arch.SM90A, dtype, Dtype.BF16, 192, 128, causal, True) for causal in (True, False)]


def test_warmup_without_arguments_is_of_e4m3(recorder, monkeypatch):
    warmed: list = []
    monkeypatch.setattr(prepare, "warmup", warmed.extend)
    tokenspeed_mla.warmup_compile_prefill()
    assert {(v.dtype, v.d_qk, v.d_v) for v in warmed} == {(Dtype.E4M3, 192, 128)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q_dtype": torch.float32}, "q_dtype is torch.float32"),
        ({"q_dtype": "bf16"}, "q_dtype is a str"),
        ({"d_qk": 0}, "d_qk is 0"),
        ({"d_v": 1.5}, "d_v is a float"),
        ({"enable_pdl": 2}, "enable_pdl is 2"),
        ({"d_qk": 256}, r"prefill head dims \(qk, v\) are .*, not \(256, 128\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_warmup_refuses_by_name(recorder, monkeypatch, changes, text):
    monkeypatch.setattr(tsmla.loading.gpu, "current_arch", lambda: (None, "no GPU"))
    with pytest.raises(ArgumentError, match=text):
        tokenspeed_mla.warmup_compile_prefill(**changes)


def test_the_number_of_sms(recorder):
    assert tokenspeed_mla.get_num_sm(torch.device("cuda")) == SMS


def test_has_binary_prefill_is_tsmla_s(monkeypatch, nothing_shipped, tmp_path):
    monkeypatch.setattr(tsmla.loading.gpu, "current_arch", lambda: (Arch.SM90A, "GPU 0"))
    assert tokenspeed_mla.has_binary_prefill() is False
    assert tokenspeed_mla.has_binary_prefill(str(tmp_path / "absent.so")) is False


def test_the_two_environment_variables(recorder, monkeypatch, nothing_shipped, tmp_path):
    """Read when a kernel is first needed, as its own names are."""
    search = resolve.resolve
    monkeypatch.setattr(resolve, "kernel", lambda variant: search(variant).function)
    monkeypatch.setenv("TOKENSPEED_MLA_PREFILL_BACKEND", "binary")
    with pytest.raises(tsmla.KernelUnavailable, match="cached: not used, the backend is binary"):
        tokenspeed_mla_prefill(**prefill_inputs())
    absent = tmp_path / "absent.so"
    monkeypatch.setenv("TOKENSPEED_MLA_FMHA_BINARY_SO", str(absent))
    with pytest.raises(tsmla.LibraryError, match=str(absent)):
        tokenspeed_mla_prefill(**prefill_inputs())
