"""What rows of a cache hold, in PyTorch's terms, and caches that lie between guard bytes."""

from __future__ import annotations

import math

import torch
import tsmla
from tsmla.identity.row_format import ROWS
from tsmla.identity.support import CACHE_DTYPES
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.cache import rotated

E4M3 = torch.float8_e4m3fn
FORMATS = [(format, TORCH_DTYPE_OF[dtype]) for format, dtypes in CACHE_DTYPES.items() for dtype in dtypes]
"""Format, and the dtype of rows outside of the cache."""
WIDTHS = {
    "bf16": {"cache": 1152},
    "fp16": {"cache": 1152},
    "e4m3": {"cache": 576},
    "fp8_ds_mla": {"cache": 656},
    "snapmla": {"cache": 512, "rope_cache": 128, "scale_cache": 4},
    "latent_bf16": {"cache": 1024},
    "latent_fp16": {"cache": 1024},
    "latent_e4m3": {"cache": 512},
}
"""Bytes of a row in each tensor."""
SCALE = {"e4m3": 0.37, "latent_e4m3": 0.41}
"""What calls are given as `scale`, where a format has one."""
POISON = 0xFF
"""Byte of what nobody wrote: NaN in every dtype."""
_GUARD_BYTES = 256
_ELEMENT = {
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "latent_bf16": torch.bfloat16, "latent_fp16": torch.float16},
    **{"rope_cache": torch.bfloat16, "scale_cache": torch.float32},
}


def cut(rows: torch.Tensor, format: str = "") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latent and rope parts of rows, the latter None where rows of the format have none."""
    return rows[:, :512], None if format and not ROWS[format].has("rope") else rows[:, 512:576]


def rounded_or_not(format: str) -> tuple[bool | None, ...]:
    """What `power_of_two_scales` may be for rows of a format."""
    return (False, True) if ROWS[format].scales else (None,)


def element_of(format: str, name: str, as_uint8: bool = False) -> torch.dtype:
    """The dtype of a tensor of a cache. as_uint8: that of what may be bytes."""
    return _ELEMENT.get(format if name == "cache" else name, torch.uint8 if as_uint8 else E4M3)


def spread(*shape: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """Normal values over 28 powers of two, so that there are FP8 subnormals and values beyond its range."""
    exponents = torch.randint(-14, 14, shape, device=device)
    return torch.ldexp(torch.randn(shape, device=device), exponents).to(dtype)


def difficult(tokens: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """[tokens, 576]: rows that are usual, have an outlier, a large rope part, nothing but zeros, tiny or huge numbers,
    infinities, or NaN, in turn."""
    rows = spread(tokens, 576, dtype=dtype, device=device)
    rows[1::8] = torch.randn(rows[1::8].shape, device=device).to(dtype)
    rows[1::8, 77] *= 64
    rows[2::8, 512:] *= 100
    rows[3::8, :512] = 0
    rows[4::8] = torch.randn(rows[4::8].shape, device=device).to(dtype) * torch.finfo(dtype).tiny
    rows[5::8] = (torch.rand(rows[5::8].shape, device=device) * torch.finfo(dtype).max).to(dtype)
    rows[6::8, 5], rows[6::8, 300], rows[6::8, 520] = math.inf, -math.inf, math.inf
    rows[7::8, 6], rows[7::8, 128:256], rows[7::8, 530] = math.nan, math.nan, math.nan
    return rows


def amax(block: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in the last dimension of those that are not NaN; 0 where all are."""
    magnitudes = block.abs()
    return torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(-1, keepdim=True)


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below x. Exact: in float64 no quotient here is subnormal."""
    powers = torch.exp2(torch.arange(-150, 129, dtype=torch.float64, device=x.device))
    return torch.where(x.isinf(), x, powers[torch.searchsorted(powers, x.double()).clamp_max(278)].float())


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """NaN as kernels write it: positive."""
    codes = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


def bf16(x: torch.Tensor) -> torch.Tensor:
    bits = x.to(torch.bfloat16).view(torch.int16)
    return as_bytes(torch.where(x.isnan(), 0x7FFF, bits))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def scales_of(c: torch.Tensor, format: str, power_of_two: bool) -> torch.Tensor:
    """The scales of stored rows: of "fp8_ds_mla" [tokens, 4, 1], of "snapmla" [tokens, 1]."""
    limit = torch.full((1,), 448.0, device=c.device)  # divided by, not multiplied by its reciprocal
    if format == "snapmla":
        scales = amax(c).clamp_min(1e-26) / limit
        rounded = power_of_two_above(scales) if power_of_two else scales
        return torch.where(amax(c) == 0, 1.0, rounded)
    scales = (amax(c.view(-1, 4, 128)) / limit).clamp_min(2.0**-126)
    return power_of_two_above(scales) if power_of_two else scales


def stored(
    kv_c: torch.Tensor, k_pe: torch.Tensor | None, format: str, scale: float = 1.0, power_of_two: bool | None = None
) -> dict[str, torch.Tensor]:
    """The bytes of each token's row, by the tensor that holds them."""
    c = kv_c.float()
    if format in ("latent_bf16", "latent_fp16"):
        return {"cache": as_bytes(kv_c)}
    if format == "latent_e4m3":
        return {"cache": e4m3(c / torch.tensor(scale, device=c.device))}
    r = k_pe.float().view(-1, 64)
    if format in ("bf16", "fp16"):
        return {"cache": as_bytes(torch.cat([kv_c, k_pe.view(-1, 64)], -1))}
    if format == "e4m3":
        return {"cache": e4m3(torch.cat([c, r], -1) / torch.tensor(scale, device=c.device))}
    power_of_two = format == "snapmla" if power_of_two is None else power_of_two
    s = scales_of(c, format, power_of_two)
    if format == "snapmla":
        return {"cache": e4m3(c / s), "rope_cache": bf16(r / s), "scale_cache": as_bytes(s)}
    codes = e4m3(c.view(-1, 4, 128) / s).view(-1, 512)
    return {"cache": torch.cat([codes, as_bytes(s.view(-1, 4)), as_bytes(k_pe.view(-1, 64))], -1)}


def restored(rows: dict[str, torch.Tensor], format: str, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """[tokens, 576], or [tokens, 512], that `stored` rows are read as."""
    first = rows["cache"]
    if format in ("bf16", "fp16", "latent_bf16", "latent_fp16"):
        return first.view(dtype)
    if format in ("e4m3", "latent_e4m3"):
        return (first.view(E4M3).float() * torch.tensor(scale, device=first.device)).to(dtype)
    if format == "snapmla":
        s = rows["scale_cache"].view(torch.float32)
        latent, rope = first.view(E4M3).float() * s, rows["rope_cache"].view(torch.bfloat16).float() * s
        return torch.cat([latent, rope], -1).to(dtype)
    s = first[:, 512:528].contiguous().view(torch.float32)[..., None]
    latent = (first[:, :512].contiguous().view(E4M3).float().view(-1, 4, 128) * s).view(-1, 512).to(dtype)
    return torch.cat([latent, first[:, 528:].contiguous().view(torch.bfloat16)], -1)


class Cache:
    """The tensors of a cache in poisoned memory. row_gap, page_gap: bytes between rows and between pages. as_uint8: the
    dtype of what may be bytes."""

    def __init__(
        self, format: str, pages: int, page: int, row_gap: int = 0, page_gap: int = 0, as_uint8: bool = False
    ) -> None:
        self.pages, self.page, self.format = pages, page, format
        self._memory, self._shape, self.tensors = {}, {}, {}
        for name, width in WIDTHS[format].items():
            row = width + row_gap
            stride = page * row + page_gap
            memory = torch.full((pages * stride + 2 * _GUARD_BYTES,), POISON, dtype=torch.uint8, device="cuda")
            self._memory[name], self._shape[name] = memory, ((pages, page, width), (stride, row, 1), _GUARD_BYTES)
            rows = memory.as_strided(*self._shape[name]).view(element_of(format, name, as_uint8))
            self.tensors[name] = rows[..., 0] if name == "scale_cache" else rows

    def put(self, slots: torch.Tensor, rows: dict[str, torch.Tensor]) -> None:
        """Write `stored` rows, as an operator has to; other slots are nobody's."""
        kept = (slots >= 0) & (slots < self.pages * self.page)
        for name, content in rows.items():
            view = self._memory[name].as_strided(*self._shape[name])
            view[slots[kept] // self.page, slots[kept] % self.page] = content[kept]

    def differences(self, other: Cache) -> dict[str, int]:
        """Bytes that differ, by tensor, guards and gaps included."""
        counts = {name: int((memory != other._memory[name]).sum()) for name, memory in self._memory.items()}
        return {name: count for name, count in counts.items() if count}


def wrongly_rotated(
    format: str, pages: int, page: int, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
    table: torch.Tensor, interleaved: bool,
) -> dict[str, int]:  # fmt: skip
    """Differences between what mla_write_cache writes of rows whose rope parts it rotates and what it must, but for the
    bits of NaN that a rotation gives in rope parts of 16 bits."""
    scale = SCALE.get(format, 1.0)
    cache, expected = Cache(format, pages, page), Cache(format, pages, page)
    k_pe = rotated(rows[:, 512:], positions.long(), table, interleaved)
    expected.put(slots, stored(rows[:, :512], k_pe, format, scale))
    rotation = {"positions": positions, "cos_sin_cache": table, "rope_interleaved": interleaved}
    tsmla.mla_write_cache(*cut(rows), slots, **cache.tensors, format=format, scale=scale, **rotation)
    for each in (cache, expected):
        written = each.tensors["cache"]
        if format == "fp8_ds_mla":
            written = written.view(torch.uint8)[..., 528:].view(torch.bfloat16)
        if written.dtype.itemsize == 2:
            written.masked_fill_(written.isnan(), math.nan)
    return cache.differences(expected)
