"""Junk for every argument, variable and word: what comes back is a result or an error of tsmla's own, never another.

Operators run as in their own tests, with CPU tensors for CUDA ones and a kernel that refuses what a compiled one does.
"""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import tsmla
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from launches import ROOM, processors
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from refusing import refusing
from tsmla.errors import CacheMiss, CompileError, TsmlaError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import gpu, jit, resolve, toolchain
from tsmla.loading import settings as variables
from tsmla.operators import checks
from tsmla.tools import cli, emulated

junk_settings = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Hostile:
    """Answers everything that Python asks of a value with an error."""

    def _fail(self, *_: object) -> Any:
        raise RuntimeError("asked too much")

    __bool__ = __float__ = __index__ = __int__ = __len__ = __iter__ = __repr__ = __str__ = __getattr__ = _fail
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __mul__ = _fail
    __hash__ = _fail


VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 10**400, 10**5000, -(10**400), 0.0, -0.0, 0.5, 1e-45, 1e39, -1.0,
    math.nan, math.inf, -math.inf, 1j, 0j, 1 + 0j, 2 + 0j, 512 + 0j, np.complex64(64), decimal.Decimal(0),
    decimal.Decimal(1), decimal.Decimal(2), decimal.Decimal(512), decimal.Decimal("sNaN"), "", "2", "bf16", "cuda",
    b"2", (), [], [1], {}, {"a": 1}, set(), Hostile, fractions.Fraction(1, 3), fractions.Fraction(10**400, 3),
    decimal.Decimal("0.5"), np.float32(0.5), np.int64(2), np.uint8(255), np.bool_(True), np.longdouble("1e4000"),
    np.ones(2), np.array("x"), np.datetime64(1, "s"), range(3), len, object(), torch.float32, torch.bfloat16,
    torch.float8_e5m2, torch.device("cpu"), torch.Size([2]), Path("x"),
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.int8]
DTYPES += [torch.uint8, torch.bool, torch.complex64, torch.float64]


@some.composite
def tensors(draw: some.DrawFn) -> torch.Tensor:
    shape = draw(some.lists(some.sampled_from([0, 1, 2, 3, 4, 64, 128, 192, 576]), max_size=4))
    made = torch.zeros(shape if math.prod(shape) < 2**22 else shape[:2], dtype=draw(some.sampled_from(DTYPES)))
    if made.ndim > 1 and draw(some.booleans()):
        made = made.transpose(0, -1)
    if made.ndim and draw(some.booleans()):
        made = made[..., ::2]
    return draw(odd(made)) if draw(some.booleans()) else made


def odd(tensor: torch.Tensor) -> some.SearchStrategy[torch.Tensor]:
    """The tensor, changed so that most are wrong."""
    # What torch negates is known of floating-point tensors only, after the first call of a kind.
    makers = [make for case, (make, _) in ODD.items() if tensor.is_floating_point() or case != "negated"]
    if tensor.is_floating_point():
        makers += [make for make, _ in FLOATS_ONLY.values()]
    if tensor.ndim > 1 and tensor.numel():
        makers += [OVERLAPPING["expanded"], lambda x: x[1:], lambda x: x[..., :-1], lambda x: x.transpose(0, -1)]
    makers += [lambda x: x.to("meta"), lambda x: x[None], lambda x: x.tolist() if x.numel() < 99 else x.shape]
    makers += [lambda x, dtype=dtype: torch.zeros(x.shape, dtype=dtype) for dtype in DTYPES]

    def made(make: Callable[[torch.Tensor], Any]) -> Any:
        try:
            return make(tensor)
        except (RuntimeError, NotImplementedError):  # torch cannot make it of this shape or dtype
            return tensor

    return some.sampled_from(makers).map(made)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


OPERATORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "prefill": (
        tsmla.tsmla_prefill,
        {
            "query": zeros(5, 4, 192), "key": zeros(7, 2, 192), "value": zeros(7, 2, 128), "seq_lens": None,
            "cum_seq_lens": lengths(0, 3, 7), "max_seq_len": 4, "batch_size": 2, "softmax_scale": 0.1,
            "is_causal": True, "return_lse": False, "cum_seq_lens_q": lengths(0, 3, 5), "max_seq_len_q": 3,
            "enable_pdl": False, "out": zeros(5, 4, 128), "k_scale": 1.0, "v_scale": 1.0, "output_scale": 1.0,
            "out_dtype": None, "sinks": zeros(4, dtype=torch.float32), "lse_includes_sink": False,
        },
    ),
    "decode": (
        tsmla.tsmla_decode,
        {
            "query": zeros(3, 2, 4, 576), "kv_cache": zeros(4, 64, 576),
            "workspace_buffer": ROOM, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "block_tables": zeros(3, 2, dtype=torch.int32), "seq_lens": lengths(1, 2, 3),
            "max_seq_len": 128, "softmax_scale": 0.1, "output_scale": 1.0, "out": zeros(3, 2, 4, 512),
            "is_var_seq": True, "causal_mask": True, "window_left": -1, "enable_pdl": False, "return_lse": False,
            "causal_seqs": lengths(1, 2, 3), "cp_world": 1, "cp_rank": 0, "cp_interleave_size": 1, "min_split_kv": 1,
            "local_visible_lens": zeros(3, 2, dtype=torch.int32), "lse_base": 2.0,
            "sinks": zeros(4, dtype=torch.float32), "lse_includes_sink": False, "batch_invariant": False,
        },
    ),
    "pack": (
        tsmla.mla_kv_pack_quantize_fp8,
        {
            "k_nope": zeros(5, 3, 128), "k_pe": zeros(5, 1, 64), "v": zeros(5, 3, 128), "k_scale_inv": 1.0,
            "v_scale_inv": 1.0, "k_out": zeros(5, 3, 192, dtype=torch.float8_e4m3fn),
            "v_out": zeros(5, 3, 128, dtype=torch.float8_e4m3fn), "fp8_dtype": torch.float8_e4m3fn, "enable_pdl": False,
        },
    ),
    "write_cache": (
        tsmla.mla_write_cache,
        {
            "kv_c": zeros(5, 512), "k_pe": zeros(5, 1, 64), "slot_mapping": torch.arange(5),
            "cache": zeros(4, 16, 512, dtype=torch.uint8), "rope_cache": zeros(4, 16, 64),
            "scale_cache": zeros(4, 16, dtype=torch.float32), "format": "snapmla", "scale": 1.0,
            "power_of_two_scales": None, "positions": torch.arange(5), "cos_sin_cache": zeros(9, 64),
            "rope_interleaved": True, "enable_pdl": False,
        },
    ),
    "read_cache": (
        tsmla.mla_read_cache,
        {
            "cache": zeros(4, 16, 576, dtype=torch.float8_e4m3fn), "kv_c": zeros(5, 512), "k_pe": zeros(5, 64),
            "indices": None, "block_tables": zeros(3, 2, dtype=torch.int32), "cum_seq_lens": lengths(0, 1, 1, 5),
            "seq_starts": lengths(0, 1, 2), "rope_cache": None, "scale_cache": None, "format": "e4m3", "scale": 0.5,
            "enable_pdl": False,
        },
    ),
    "quantize_q": (
        tsmla.mla_quantize_q,
        {
            "query": (zeros(2, 3, 4, 512), zeros(2, 3, 4, 64)), "power_of_two_scales": True,
            "nope_out": zeros(2, 3, 4, 512, dtype=torch.float8_e4m3fn), "rope_out": zeros(2, 3, 4, 64),
            "scale_out": zeros(2, 3, 4, dtype=torch.float32), "enable_pdl": False,
        },
    ),
    "key_mask": (
        tsmla.tsmla_key_mask,
        {
            "indices": zeros(3, 5, dtype=torch.int32), "keys": 40, "topk_length": lengths(0, 1, 5),
            "out": zeros(3, 2, dtype=torch.int32), "enable_pdl": False,
        },
    ),
}  # fmt: skip


class Changes(dict[str, Any]):
    """Junk for one to three arguments of a call, spelled without asking it anything that it may refuse to tell."""

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {self._spelled(junk)}" for name, junk in self.items())

    @staticmethod
    def _spelled(junk: Any) -> str:
        if not isinstance(junk, torch.Tensor):
            return type(junk).__name__ if isinstance(junk, Hostile) else checks.spelled(junk)
        if junk.is_nested or junk.layout is not torch.strided:
            return f"{type(junk).__name__} of layout {junk.layout}"
        return f"{type(junk).__name__} {junk.dtype} {tuple(junk.shape)} strides {junk.stride()} on {junk.device}"


@some.composite
def changes(draw: some.DrawFn, operator: str) -> Changes:
    changed, (_, arguments) = Changes(), OPERATORS[operator]
    for name in draw(some.lists(some.sampled_from([*arguments]), min_size=1, max_size=3, unique=True)):
        junk = some.sampled_from(VALUES).map(lambda x: Hostile() if x is Hostile else x)
        if isinstance(arguments[name], torch.Tensor):
            junk = some.one_of(junk, tensors(), odd(arguments[name]))
        changed[name] = draw(some.one_of(junk, tensors()))
    return changed


def answered(call: Callable[[], object]) -> bool:
    """Whether a call returns; otherwise it raises one of our errors, with a text."""
    try:
        call()
    except TsmlaError as error:
        assert str(error)
        return False
    return True


@pytest.fixture
def cpu_for_cuda(monkeypatch) -> None:
    """CPU tensors pass for those of an H200, and kernels refuse what they refuse, and launch nothing."""

    def kernel(variant: Any) -> Callable[..., None]:
        alike = {"causal": True} if hasattr(variant, "causal") else {}
        return refusing(dataclasses.replace(variant, **alike))

    monkeypatch.setattr(resolve, "kernel", kernel)
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    processors(monkeypatch)


@pytest.mark.parametrize("name", OPERATORS)
def test_junk_for_an_operator(cpu_for_cuda, name: str) -> None:
    """Each junk call alone and after a right one, whose results it must not take for its own."""
    operator, arguments = OPERATORS[name]
    assert answered(lambda: operator(**arguments))

    @settings(junk_settings, max_examples=120)
    @given(changes(name))
    def refused_or_answered(changed: Changes) -> None:
        resolve.forget()
        alone = answered(lambda: operator(**{**arguments, **changed}))
        resolve.forget()
        operator(**arguments)
        after_another = answered(lambda: operator(**{**arguments, **changed}))
        assert after_another == alone

    refused_or_answered()


@pytest.mark.parametrize("name", OPERATORS)
def test_equal_numbers_of_other_types(cpu_for_cuda, name: str) -> None:
    """Each option alone, and after a right call, as a number of another type that equals the right one."""
    operator, arguments = OPERATORS[name]
    types = (int, float, complex, decimal.Decimal, fractions.Fraction, np.float32, np.complex64, np.longdouble, np.int8)
    for option, right in arguments.items():
        if not isinstance(right, int | float):
            continue
        for equal in (kind(right) for kind in types if right < 128 or kind is not np.int8):
            if equal == right:
                call = functools.partial(operator, **{**arguments, option: equal})
                resolve.forget()
                alone = answered(call)
                resolve.forget()
                operator(**arguments)
                assert answered(call) == alone, (option, repr(equal))


@pytest.mark.parametrize("name", OPERATORS)
def test_a_hostile_value_for_each_argument(name: str) -> None:
    operator, arguments = OPERATORS[name]
    for argument in arguments:
        assert not answered(functools.partial(operator, **{**arguments, argument: Hostile()})), argument


@pytest.mark.parametrize("name", OPERATORS)
def test_junk_for_an_operator_without_a_gpu(name: str) -> None:
    operator, arguments = OPERATORS[name]

    @settings(junk_settings, max_examples=40)
    @given(changes(name))
    def refused(changed: Changes) -> None:
        served = answered(lambda: operator(**{**arguments, **changed}))
        assert not served

    refused()


@settings(junk_settings, max_examples=60)
@given(some.lists(some.sampled_from([v for v in VALUES if v is not Hostile]), min_size=5, max_size=5))
def test_junk_for_the_size_of_a_workspace(junk: list[Any]) -> None:
    answered(lambda: tsmla.decode_workspace_size(*junk))


@pytest.fixture
def idle_tools(monkeypatch, tmp_path) -> None:
    """A machine where nothing is compiled, installed or emulated."""

    def no_entry(variant: Any) -> Any:
        raise CacheMiss("nothing kept")

    def no_compiler(variant: Any) -> Any:
        raise CompileError("no compiler")

    monkeypatch.setattr(gpu, "_driver", lambda: None)
    monkeypatch.setattr(emulated, "installed", lambda: False)
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: tmp_path)
    monkeypatch.setattr(jit, "load_cached", no_entry)
    monkeypatch.setattr(jit, "compile_now", no_compiler)


VARIABLES = [name for s in variables.SETTINGS for name in (s.name, s.alias) if name]
texts = some.one_of(
    some.sampled_from(["", "~", "~nosuchuser", "~/x.so", "auto", "binary", "jit", "1", "/", "/dev/null", "x" * 5000]),
    some.binary(max_size=20).map(lambda junk: os.fsdecode(junk.replace(b"\0", b"~"))),
)


@settings(junk_settings, max_examples=60)
@given(some.dictionaries(some.sampled_from([*VARIABLES, "HOME"]), texts))
def test_junk_in_variables(idle_tools, capsys, environment: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, environment):
        for family in FAMILIES:
            answered(lambda family=family: variables.backend(family))
        for read in (variables.fmha_binary_so, variables.cache_dir, variables.verify):
            answered(read)
        tsmla.binary_status("sm_90a")
        assert cli.main(["show-config"]) == 0
        assert cli.main(["probe", "--arch", "sm_90a"]) == 1
    capsys.readouterr()


WORDS = """show-config probe list verify warmup demo --arch sm_90a sm_80 --family pack prefill decode pick --json
--variant family=pack foo family=pack,arch=sm_90a,dtype=bf16,out_dtype=e4m3,d_nope=128,d_rope=64,d_v=128,pdl=false
--emulated tsmla_pack_sm_90a -- - --help -h . /dev/null =,= , = 1 -1""".split()


@settings(junk_settings, max_examples=150)
@given(some.lists(some.one_of(some.sampled_from(WORDS), texts.filter(lambda text: text[:1] != "~")), max_size=6))
def test_junk_words(idle_tools, capsys, words: list[str]) -> None:
    try:
        status = cli.main(words)
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status in (0, 1, 2)
    assert status == 0 or said.out or said.err
