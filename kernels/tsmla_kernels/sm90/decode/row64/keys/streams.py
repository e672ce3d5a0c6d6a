"""Which stream of keys a kernel of the Hopper decode has."""

from __future__ import annotations

from ..geometry import PAIR, DecodeGeometry
from .converted import ConvertedStream
from .gathered import GatheredByLoadersStream, GatheredStream
from .gathered_paired import GatheredPairedStream
from .gathered_scaled import GatheredScaledStream
from .gathered_stored import GatheredConvertedStream
from .paired import PairedStream
from .scaled import ScaledStream
from .stream import KeyStream


def stream_of(geometry: DecodeGeometry) -> KeyStream:
    """The stream of keys that a kernel of these sizes has."""
    if geometry.gathers and geometry.converts:
        return GatheredPairedStream(geometry) if geometry.ctas == PAIR else GatheredConvertedStream(geometry)
    if geometry.gathers and geometry.scaled:
        return GatheredScaledStream(geometry)
    if geometry.gathers:
        return GatheredByLoadersStream(geometry) if geometry.turns else GatheredStream(geometry)
    if geometry.ctas == PAIR:
        return PairedStream(geometry)
    if geometry.converts:
        return ConvertedStream(geometry)
    if geometry.scaled:
        return ScaledStream(geometry)
    return KeyStream(geometry)
