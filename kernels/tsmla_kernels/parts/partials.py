"""Partial results of split units in the caller's workspace: normalised float32 rows and their base-2 LSE.

The workspace is uninitialised bytes. It holds `slots` partials of `stored` = min(row tile, rows of a request)
rows: all rows [slots, stored, LATENT_DIM], then all LSE [slots, stored]. Row i of a slot is row i of its row tile.
A row that sees no key of its segment is 0 with LSE -inf. Every row of a row tile must be written, only those are read.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from tsmla.plan import PARTIAL_ROW, Deal
from tsmla.support import LATENT_DIM


class Partials(NamedTuple):
    """Rows [slots, stored, LATENT_DIM] and LSE [slots, stored]."""

    rows: cute.Tensor
    lse: cute.Tensor
    slots: Int32


@cute.jit
def partials_of(deal: cutlass.Constexpr[Deal], workspace: cute.Tensor, rows: Int32) -> Partials:
    """The workspace [bytes] as partials, as many as fit; `rows` is q_len x heads."""
    stored = cutlass.min(rows, deal.row_tile)
    slots = workspace.shape[0] // (stored * PARTIAL_ROW * 4)
    words = cute.recast_ptr(workspace.iterator, dtype=Float32)
    slot_stride = Int64(stored) * LATENT_DIM
    lse_at = words + slots * slot_stride
    return Partials(
        cute.make_tensor(
            words, cute.make_layout((slots, stored, LATENT_DIM), stride=(slot_stride, LATENT_DIM, 1))
        ),
        cute.make_tensor(lse_at, cute.make_layout((slots, stored), stride=(stored, 1))),
        slots,
    )
