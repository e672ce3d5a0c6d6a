"""What a decode call asks of the CTAs that work together, as every role is told."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...parts.decode_line import Work
from ...parts.decode_work import Unit
from ...parts.key_source import KeySource
from ...parts.pipeline import LEADER
from ...parts.visible import Visibility
from .geometry import DecodeGeometry


class Assignment(NamedTuple):
    """What a worker has to do: cache [pages, page size, columns], where in it keys lie, what rows see, the work of
    these CTAs, and the unit that it begins with."""

    cache: cute.Tensor
    source: KeySource
    view: Visibility
    work: Work
    unit: Unit


@cute.jit
def is_leader(geometry: cutlass.Constexpr[DecodeGeometry]) -> Boolean:
    """Whether this CTA issues the MMAs."""
    return rank_of(geometry) == LEADER if const_expr(geometry.is_pair) else Boolean(True)


@cute.jit
def rank_of(geometry: cutlass.Constexpr[DecodeGeometry]) -> Int32:
    """This CTA's number among those that work together."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(geometry.is_pair) else Int32(0)
