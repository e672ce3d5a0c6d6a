"""mla_kv_pack_quantize_fp8 on a GPU: every byte as PyTorch computes it, and no byte anywhere else."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tsmla import mla_kv_pack_quantize_fp8

D_NOPE, D_ROPE, D_V = 128, 64, 128
DTYPES = [torch.bfloat16, torch.float16]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
POISON = 0x7F
"""A NaN in both FP8 formats: an element that nobody wrote differs from every finite result."""
GUARD_BYTES = 4096

pytestmark = pytest.mark.usefixtures("seed")


def quantized(x: torch.Tensor, scale: float, fp8: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(fp8).max
    return (x.float() * scale).clamp(-limit, limit).to(fp8)


def reference(k_nope, k_pe, v, k_scale_inv=1.0, v_scale_inv=1.0, fp8=torch.float8_e4m3fn):
    shared = k_pe.reshape(k_pe.shape[0], 1, k_pe.shape[-1]).expand(-1, k_nope.shape[1], -1)
    return quantized(torch.cat((k_nope, shared), -1), k_scale_inv, fp8), quantized(v, v_scale_inv, fp8)


def assert_same_bytes(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bytes; where NaN is wanted any NaN will do (its sign and payload are nobody's contract)."""
    assert got.shape == want.shape and got.dtype == want.dtype
    nan = want.float().isnan()
    both_nan = nan & got.float().isnan()
    wrong = ((got.view(torch.uint8) != want.view(torch.uint8)) & ~both_nan).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        pytest.fail(
            f"{name}: {len(wrong)} of {got.numel()} elements differ, first at {first}: "
            f"got {got[first].float().item()}, expected {want[first].float().item()}"
        )


def spread(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values over 28 powers of two: FP8 subnormals, ordinary values, and values beyond the range."""
    exponents = torch.randint(-14, 14, shape, device="cuda")
    return torch.ldexp(torch.randn(shape, device="cuda"), exponents).to(dtype)


def inputs(tokens: int, heads: int, dtype: torch.dtype = torch.bfloat16, layout: str = "slices"):
    """k_nope, k_pe, v as contiguous tensors, as slices of one projection, or as heads-major views."""
    k_pe = spread(tokens, 1, D_ROPE, dtype=dtype)
    if layout == "contiguous":
        return spread(tokens, heads, D_NOPE, dtype=dtype), k_pe, spread(tokens, heads, D_V, dtype=dtype)
    if layout == "slices":
        both = spread(tokens, heads, D_NOPE + D_V, dtype=dtype)
        latent = spread(tokens, 1, 512 + D_ROPE, dtype=dtype)
        return both[..., :D_NOPE], latent[..., 512:], both[..., D_NOPE:]
    assert layout == "heads-major"
    k_nope = spread(heads, tokens, D_NOPE, dtype=dtype).transpose(0, 1)
    return k_nope, k_pe.squeeze(1), spread(heads, tokens, D_V, dtype=dtype).transpose(0, 1)


class Guarded:
    """An output inside a larger poisoned buffer: bytes before, behind and, with a wider pitch, between its rows."""

    def __init__(self, tokens: int, heads: int, width: int, fp8: torch.dtype, gap: int = 0):
        size = tokens * heads * (width + gap)
        self.buffer = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device="cuda")
        rows = self.buffer[GUARD_BYTES : GUARD_BYTES + size].view(tokens, heads, width + gap)
        self.out = rows[..., :width].view(fp8)

    def assert_untouched_around(self) -> None:
        around = self.buffer.clone()
        size = around.numel() - 2 * GUARD_BYTES
        tokens, heads, width = self.out.shape
        around[GUARD_BYTES : GUARD_BYTES + size].view(tokens, heads, -1)[..., :width] = POISON
        wrong = (around != POISON).nonzero()
        assert not len(wrong), f"{len(wrong)} bytes outside the output were written, first at {wrong[0].item()}"


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16, 128])
@pytest.mark.parametrize("tokens", [1, 7, 128, 1000])
def test_bytes_equal_the_reference(tokens, heads, dtype, fp8):
    for layout in ("contiguous", "slices", "heads-major"):
        given = inputs(tokens, heads, dtype, layout)
        k_want, v_want = reference(*given, 0.37, 1.9, fp8)
        for gap in (0, 32):
            k = Guarded(tokens, heads, D_NOPE + D_ROPE, fp8, gap)
            v = Guarded(tokens, heads, D_V, fp8, gap)
            mla_kv_pack_quantize_fp8(*given, 0.37, 1.9, k.out, v.out, fp8_dtype=fp8)
            assert_same_bytes(f"k_out, {layout}, gap {gap}", k.out, k_want)
            assert_same_bytes(f"v_out, {layout}, gap {gap}", v.out, v_want)
            k.assert_untouched_around()
            v.assert_untouched_around()


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, -0.37, 3e-6, 1e30, 1e-39, 0.0])
def test_every_16_bit_pattern(dtype, fp8, scale):
    """All numbers, zeros of both signs, subnormals, infinities and NaNs there are, through K and through V."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    k_nope, v = patterns.view(64, 8, D_NOPE), patterns.flip(0).view(64, 8, D_V)
    k_pe = patterns.view(-1, 1, D_ROPE)[::16]
    got = mla_kv_pack_quantize_fp8(k_nope, k_pe, v, scale, scale, fp8_dtype=fp8)
    want = reference(k_nope, k_pe, v, scale, scale, fp8)
    assert_same_bytes("k", got[0], want[0])
    assert_same_bytes("v", got[1], want[1])
    assert want[0].float().isnan().any(), "the patterns hold NaNs"


def test_the_scales_are_not_mixed_up():
    given = inputs(33, 5)
    for k_scale, v_scale in ((1.0, 0.125), (0.125, 1.0), (1.0, 1.0)):
        got, want = mla_kv_pack_quantize_fp8(*given, k_scale, v_scale), reference(*given, k_scale, v_scale)
        assert_same_bytes("k", got[0], want[0])
        assert_same_bytes("v", got[1], want[1])


def test_nothing_to_do():
    for tokens, heads in ((0, 16), (16, 0)):
        k, v = mla_kv_pack_quantize_fp8(*inputs(tokens, heads))
        assert k.shape == (tokens, heads, D_NOPE + D_ROPE) and v.shape == (tokens, heads, D_V)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 300, 4096])
def test_dependent_launch_waits_for_its_predecessor_and_releases_its_successor(tokens):
    """Producer, pack and consumer back to back, over and over: no read may come before the write it needs."""
    heads = 16
    rounds = [inputs(tokens, heads, layout="contiguous") for _ in range(8)]
    expected = [reference(*given) for given in rounds]
    buffers = [torch.empty_like(x) for x in rounds[0]]
    kept = []
    for given in rounds:
        for buffer, x in zip(buffers, given, strict=True):
            buffer.copy_(x)
        k, v = mla_kv_pack_quantize_fp8(*buffers, enable_pdl=True)
        again, _ = mla_kv_pack_quantize_fp8(*buffers, enable_pdl=True)
        kept.append((k.view(torch.uint8).clone().view(k.dtype), again, v))
    for (k, again, v), (k_want, v_want) in zip(kept, expected, strict=True):
        assert_same_bytes("k", k, k_want)
        assert_same_bytes("k of the second launch", again, k_want)
        assert_same_bytes("v", v, v_want)


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay_reads_new_inputs(pdl):
    given = inputs(257, 16)
    k, v = mla_kv_pack_quantize_fp8(*given, enable_pdl=pdl)  # loads the kernel before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_kv_pack_quantize_fp8(*given, k_out=k, v_out=v, enable_pdl=pdl)
    for _ in range(3):
        for tensor, fresh in zip(given, inputs(257, 16), strict=True):
            tensor.copy_(fresh)
        k.view(torch.uint8).fill_(POISON)
        v.view(torch.uint8).fill_(POISON)
        graph.replay()
        k_want, v_want = reference(*given)
        assert_same_bytes("k", k, k_want)
        assert_same_bytes("v", v, v_want)


def test_the_current_stream_is_used():
    given = inputs(2048, 128)
    want = reference(*given)
    k = Guarded(2048, 128, D_NOPE + D_ROPE, torch.float8_e4m3fn)
    _, v = mla_kv_pack_quantize_fp8(*given)  # loads the kernel, which may wait for the device
    assert (k.buffer == POISON).all()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 100 ms: a launch on any other stream would be long done
        mla_kv_pack_quantize_fp8(*given, k_out=k.out, v_out=v)
    assert (k.buffer == POISON).all(), "the launch did not wait for the stream it was made on"
    side.synchronize()
    assert_same_bytes("k", k.out, want[0])
    assert_same_bytes("v", v, want[1])


def test_more_than_2_to_the_31_elements():
    """Offsets beyond 32 bits in the inputs, checked on the first, some middle and the last tokens."""
    tokens, heads = 2**31 // (128 * (D_NOPE + D_V)) + 77, 128
    needed = tokens * heads * (2 * (D_NOPE + D_V) + D_NOPE + D_ROPE + D_V) * 1.1
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(f"needs {needed / 2**30:.1f} GiB of GPU memory; {free / 2**30:.1f} are free")
    both = torch.empty(tokens, heads, D_NOPE + D_V, dtype=torch.bfloat16, device="cuda").normal_()
    assert both.numel() > 2**31
    k_pe = spread(tokens, 1, D_ROPE, dtype=torch.bfloat16)
    k, v = mla_kv_pack_quantize_fp8(both[..., :D_NOPE], k_pe, both[..., D_NOPE:])
    for part in (slice(0, 64), slice(tokens // 2, tokens // 2 + 64), slice(tokens - 128, tokens)):
        k_want, v_want = reference(both[part, :, :D_NOPE], k_pe[part], both[part, :, D_NOPE:])
        assert_same_bytes(f"k of tokens {part}", k[part], k_want)
        assert_same_bytes(f"v of tokens {part}", v[part], v_want)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="compiles kernels that do not ship: no cutlass")
@pytest.mark.parametrize("dims", [(16, 16, 16), (112, 48, 80), (512, 64, 512), (1024, 1024, 1024)])
def test_other_head_dimensions(dims):
    d_nope, d_rope, d_v = dims
    given = [spread(41, *shape, dtype=torch.bfloat16) for shape in ((5, d_nope), (1, d_rope), (5, d_v))]
    got, want = mla_kv_pack_quantize_fp8(*given), reference(*given)
    assert_same_bytes("k", got[0], want[0])
    assert_same_bytes("v", got[1], want[1])


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="compiles the shipped kernel anew: no cutlass")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_now_equals_compiled_ahead(dtype, monkeypatch):
    from tsmla.loading import resolve

    given = inputs(129, 24, dtype)
    results = {}
    for backend in ("binary", "jit"):
        monkeypatch.setenv("TSMLA_BACKEND", backend)
        resolve.forget()
        results[backend] = mla_kv_pack_quantize_fp8(*given)
    resolve.forget()
    for ahead, now in zip(results["binary"], results["jit"], strict=True):
        assert torch.equal(ahead.view(torch.uint8), now.view(torch.uint8))
