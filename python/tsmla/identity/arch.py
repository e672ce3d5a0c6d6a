"""GPU architectures, and the one table of what differs between them. Standard library only."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from .dtype import Dtype


@dataclasses.dataclass(frozen=True)
class Deal:
    """What a kernel tells the dealer about itself; costs are in KV tiles.

    overhead: fixed cost of a segment. least: shortest chunk. split: how much longer a group may be busy where there are
    fewer partial results or none. draw: tiles one CTA can stream in the time memory brings 16 to each CTA. Above 16,
    memory stays busy with some CTAs idle, so longer chunks cost nothing. sms: SMs that work on one row tile together.
    in_step: the shortest chunk with which groups walk the keys in step, where requests differ in row tiles
    (`begin_in_step` in the kernels' `decode/segments.py`); 0: they never do. single: units are cut into single tiles,
    shorter than `least`, where that makes no more segments than this (132: as many as the GPU has SMs): fewer tiles for
    each CTA are worth more than partial results cost."""

    row_tile: int
    tile_kv: int
    overhead: int
    least: int
    split: int
    draw: int = 16
    sms: int = 1
    in_step: int = 0
    single: int = 0


_LATENT = {"latent_bf16": (Dtype.BF16,), "latent_fp16": (Dtype.FP16,), "latent_e4m3": (Dtype.E4M3,)}
"""Cache rows without a rope piece -> the query's dtype."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of an architecture. Everybody who treats architectures differently asks here.

    gpus: products that a person would know it by -> their SMs, the first the most common (of Rubin: as reported).
    ships: whether wheels have kernels for it and tests run on it; kernels for any other are compiled on request.
    prefill: input dtype -> the output dtypes there are, first what is written unless asked for something else.
    prefill_dims: (d_qk, d_v), the columns of a query or key and of a value -> input dtypes.
    deal: how decodes are dealt.
    few_rows_deal: the same for requests with so few rows that they fit in the row tile of another kernel; None where
        there is no other.
    decode: dtypes of a decode's query.
    decode_rows: cache rows (`row_format.ROWS`) that decode reads besides those of the query's own dtype -> dtypes of
        the query's latent piece.
    gathered_dtypes, gathered_rows: those of `decode` and of `decode_rows` whose keys can be gathered one by one.
    """

    gpus: Mapping[str, int]
    ships: bool
    prefill: Mapping[Dtype, tuple[Dtype, ...]]
    prefill_dims: Mapping[tuple[int, int], tuple[Dtype, ...]]
    deal: Deal
    few_rows_deal: Deal | None = None
    decode: tuple[Dtype, ...] = tuple(Dtype)
    decode_rows: Mapping[str, tuple[Dtype, ...]] = dataclasses.field(
        default_factory=lambda: {"snapmla": (Dtype.E4M3,), "fp8_ds_mla": (Dtype.BF16,)} | _LATENT
    )
    gathered_dtypes: tuple[Dtype, ...] = ()
    gathered_rows: tuple[str, ...] = ()


_EIGHT_BITS = {Dtype.E4M3: (Dtype.BF16,), Dtype.E5M2: (Dtype.BF16,)}
_DIMS = {(192, 128): tuple(Dtype), (128, 128): tuple(Dtype), (256, 256): (Dtype.BF16, Dtype.E4M3)}
_HOPPER = Facts(
    gpus={"H100": 132, "H200": 132},
    ships=True,
    prefill={Dtype.BF16: (Dtype.BF16,), Dtype.FP16: (Dtype.FP16, Dtype.BF16), **_EIGHT_BITS},
    prefill_dims=_DIMS,
    deal=Deal(row_tile=64, tile_kv=64, overhead=3, least=3, split=1, in_step=64, single=132),
    gathered_dtypes=tuple(Dtype),
    gathered_rows=("fp8_ds_mla", "snapmla", *_LATENT),
)
_BLACKWELL = Facts(
    gpus={"B200": 148, "GB200": 152},
    ships=True,
    prefill={Dtype.BF16: (Dtype.BF16,), Dtype.FP16: (Dtype.FP16, Dtype.BF16), **_EIGHT_BITS},
    prefill_dims=_DIMS,
    deal=Deal(row_tile=128, tile_kv=128, overhead=4, least=2, split=12, draw=19, sms=2),
    few_rows_deal=Deal(row_tile=64, tile_kv=64, overhead=8, least=2, split=8, draw=19),
    gathered_dtypes=tuple(Dtype),
    gathered_rows=("fp8_ds_mla", "snapmla", *_LATENT),
)
UNKNOWN = dataclasses.replace(_HOPPER, gpus={}, ships=False, prefill={}, prefill_dims={}, decode=(), decode_rows={})
"""An architecture that has no kernels."""


class Arch(str, enum.Enum):
    """A GPU architecture with its feature suffix; code for one never runs on another."""

    facts: Facts

    SM90A = "sm_90a", _HOPPER
    SM100A = "sm_100a", _BLACKWELL
    SM103A = "sm_103a", dataclasses.replace(_BLACKWELL, gpus={"B300": 148, "GB300": 152})
    SM107A = "sm_107a", dataclasses.replace(_BLACKWELL, gpus={"Rubin": 204}, ships=False)

    def __new__(cls, name: str, facts: Facts | None = None) -> Arch:
        """Make a member of its row. `Arch("sm_90a")` finds a member and does not come here."""
        assert facts is not None
        arch = str.__new__(cls, name)
        arch._value_, arch.facts = name, facts
        return arch

    __str__ = str.__str__

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability (major, minor) of the GPUs that run this architecture's code."""
        number = int(self.value[3:-1])
        return number // 10, number % 10

    @property
    def gpus(self) -> str:
        """Products that a person would know the architecture by."""
        return ", ".join(self.facts.gpus)

    @property
    def sms(self) -> int:
        """SMs of the first of its products: what tests and the emulator take a GPU of this architecture to have."""
        return next(iter(self.facts.gpus.values()))

    @classmethod
    def from_capability(cls, major: int, minor: int) -> Arch | None:
        """The architecture whose code a GPU of this compute capability runs; None when there is none."""
        return next((arch for arch in cls if arch.capability == (major, minor)), None)


SHIPPED_ARCHS = tuple(arch for arch in Arch if arch.facts.ships)
SMS = {product: sms for arch in Arch for product, sms in arch.facts.gpus.items()}
"""Product -> its SMs (a GB300's: assumed, as a GB200's)."""
