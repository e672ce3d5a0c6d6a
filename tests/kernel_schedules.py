"""The schedule of every shipped kernel that has edges, by the variant it belongs to."""

from __future__ import annotations

from typing import Any

from tsmla.variant import Arch, DecodeVariant, PrefillVariant
from tsmla_kernels.sm90.decode.geometry import DecodeGeometry as HopperDecodeGeometry
from tsmla_kernels.sm90.decode.schedule import DecodeSchedule as HopperDecode
from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry as HopperPrefillGeometry
from tsmla_kernels.sm90.prefill.schedule import PrefillSchedule as HopperPrefill
from tsmla_kernels.sm100.decode.geometry import DecodeGeometry as BlackwellDecodeGeometry
from tsmla_kernels.sm100.decode.schedule import DecodeSchedule as BlackwellDecode
from tsmla_kernels.sm100.prefill.schedule import PrefillSchedule as BlackwellPrefill

from build_aot.matrix import shipped

VARIANTS = [v for v in shipped() if isinstance(v, PrefillVariant | DecodeVariant)]


def schedules_of(variant: PrefillVariant | DecodeVariant) -> dict[str, Any]:
    """By kernel: a folder of tsmla_kernels and, where two geometries share it, which of them."""
    if isinstance(variant, PrefillVariant):
        if variant.arch is Arch.SM90A:
            return {"sm90/prefill": HopperPrefill.of(HopperPrefillGeometry.of(variant))}
        return {"sm100/prefill": BlackwellPrefill.of(variant)}
    if variant.arch is Arch.SM90A:
        return {"sm90/decode": HopperDecode.of(HopperDecodeGeometry.of(variant))}
    return {
        "sm100/decode solo": BlackwellDecode(BlackwellDecodeGeometry.solo(variant)),
        "sm100/decode pair": BlackwellDecode(BlackwellDecodeGeometry.pair(variant)),
    }
