"""What attention leaves for the combine in the caller's workspace: partial results of split units, and where they are.

The workspace is uninitialised bytes, and nothing in it outlives a call. It holds, one behind the other,

- records, RECORD_BYTES each: what there is to combine of one row tile (`Record`). Where there are as many groups of
  workers as units, or more, unit u has records u x group to u x group + group - 1, one for each column. Otherwise, and
  where requests differ in row tiles, worker w has record w, for the last unit that starts in its positions: only that
  one can go on behind them and be split. All records are written in every call, so that the combine need not know how
  the work was dealt;
- the rows of `slots` partials, as many as fit, [slots, stored, columns], where stored = min(row tile, most rows of a
  request); normalised, or lifted, in the form that `PartialRows` says. Row i of a slot is row i of its row tile. A row
  that sees no key of its segment is 0. Every row of a row tile must be written, only those are read;
- their base-2 LSE [slots, stored] float32, -inf for rows that see no key;
- where rows are lifted, [slots, stored, factors] float32: what normalises the blocks of columns that share a factor."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from tsmla.identity.arch import Deal
from tsmla.identity.plan import RECORD_BYTES, row_tiling

from ..parts.alignment import aligned
from ..parts.keys.visible import Visibility
from .line import Work, group_of, mixes, most_row_tiles
from .partial_rows import PartialRows
from .segments import Segment, Unit, head_slot, split_of, tail_slot

LANE_RECORDS = 5
"""Records that a lane looks at together, so that their loads are in flight together: a warp's lanes then look at as
many as a GPU has SMs."""


class Partials(NamedTuple):
    """The workspace as tensors: records [number, words] int32, rows [slots, stored, columns], LSE [slots, stored].
    downs: where rows are lifted, what each block of a row's columns is multiplied by to undo that, [slots, stored,
    (2, 2)]; else None."""

    records: cute.Tensor
    rows: cute.Tensor
    lse: cute.Tensor
    slots: Int32
    downs: cute.Tensor | None


class Record(NamedTuple):
    """What the combine does for one row tile: rows `row .. row + rows - 1` of all requests are the sum of `partials`
    partial results, in slot `head` and then in `tail`, `tail + stride`, ...; `partials` is 0 where there is nothing to
    combine."""

    partials: Int32
    row: Int32
    rows: Int32
    head: Int32
    tail: Int32
    stride: Int32


@cute.jit
def partials_of(
    columns: cutlass.Constexpr[int],
    row_tile: Int32,
    given,
    view: Visibility,
    kept: cutlass.Constexpr[PartialRows],
) -> Partials:
    """View the workspace of a call that writes rows of `columns` columns; without slots where units must not be split.
    given: what the call's table lists, by name. kept: the form in which partial rows are kept."""
    workspace, workers = given.workspace, given.workers
    rows = view.q_len * given.query.shape[2]
    tiling = row_tiling(rows, row_tile)
    records = cutlass.min(view.seq_lens.shape[0] * tiling.rounds, workers // tiling.group) * tiling.group
    if mixes(view, tiling.row_tiles) != 0:
        records = workers
    stored = cutlass.min(rows, row_tile)
    slots = (workspace.shape[0] - records * RECORD_BYTES) // (stored * kept.row_bytes(columns))
    if given.batch_invariant != 0:
        slots = Int32(0)
    slot_stride = Int64(stored) * columns
    rows_at = aligned(cute.recast_ptr(workspace.iterator + records * RECORD_BYTES, dtype=kept.dtype), 16)
    lse_at = aligned(cute.recast_ptr(rows_at + slots * slot_stride, dtype=Float32), 4)
    downs = None
    if const_expr(kept.lifted):
        factors = kept.lifted.factors
        downs = cute.make_tensor(
            lse_at + slots * stored,
            cute.make_layout((slots, stored, (2, 2)), stride=(stored * factors, factors, kept.lifted.value)),
        )
    return Partials(
        cute.make_tensor(
            cute.recast_ptr(workspace.iterator, dtype=Int32),
            cute.make_layout((records, RECORD_BYTES // 4), stride=(RECORD_BYTES // 4, 1)),
        ),
        cute.make_tensor(rows_at, cute.make_layout((slots, stored, columns), stride=(slot_stride, columns, 1))),
        cute.make_tensor(lse_at, cute.make_layout((slots, stored), stride=(stored, 1))),
        slots,
        downs,
    )


@cute.jit
def most_split(partials: Partials, view: Visibility, heads: Int32, row_tile: Int32) -> Int32:
    """The most records that have something to combine; asked on the host."""
    return Int32(cutlass.min(Int64(partials.records.shape[0]), most_row_tiles(view, heads, row_tile)))


@cute.jit
def begin_records(work: Work, records: cute.Tensor) -> None:
    """Clear the worker's own record. One warp of each worker must call this before it calls `record_unit`, also where
    the worker has nothing to do."""
    worker = work.index * group_of(work) + work.column
    if not _by_unit(work, records) and worker < records.shape[0]:
        _write(records, worker, Record(*(Int32(0) for _ in Record._fields)))


@cute.jit
def record_unit(deal: cutlass.Constexpr[Deal], work: Work, records: cute.Tensor, unit: Unit, segment: Segment) -> None:
    """Write what the combine must know of a unit. One warp must call this for every unit that overlaps the worker's
    positions, those that start there in their order, with what `segment_of` says of each."""
    if unit.start >= work.begin:
        by_unit = _by_unit(work, records)
        split = split_of(deal, work, unit, segment)
        is_split = split.count > 1
        if by_unit or is_split:
            unit_number, group = unit.request * work.terms.rounds + unit.round, group_of(work)
            record = Record(
                split.count if is_split else Int32(0),
                segment.first_row,
                segment.rows,
                head_slot(deal, work, unit, split.first_group) * group + work.column,
                tail_slot(deal, work, split.first_group + 1) * group + work.column,
                group,
            )
            _write(records, (unit_number if by_unit else work.index) * group + work.column, record)


@cute.jit
def find_record(records: cute.Tensor, number: Int32) -> Int32:
    """The place of record `number` of those that have something to combine; -1 where there are fewer. All lanes of a
    warp must ask together."""
    found, before, lane = Int32(-1), Int32(0), cute.arch.lane_idx()
    last = records.shape[0] - 1
    for base in cutlass.range(0, last + 1, 32 * LANE_RECORDS, unroll=1):
        places = [base + 32 * i + lane for i in range(LANE_RECORDS)]
        counts = [records[cutlass.min(place, last), 0] for place in places]
        for i in cutlass.range_constexpr(LANE_RECORDS):
            has_some = (counts[i] > 0) & (places[i] <= last)
            those = cute.arch.vote_ballot_sync(has_some)
            mine = before + cute.arch.popc(those & ((1 << lane) - 1))
            winner = cute.arch.vote_ballot_sync(has_some & (mine == number))
            if winner != 0:
                found = base + 32 * i + cute.arch.popc(winner - 1)
            before += cute.arch.popc(those)
    return found


@cute.jit
def read_record(records: cute.Tensor, number: Int32) -> Record:
    words = cute.make_rmem_tensor(RECORD_BYTES // 4, Int32)
    cute.autovec_copy(_place(records, number), words)
    return Record(*(words[i] for i in range(len(Record._fields))))


@cute.jit
def partial_slot(record: Record, number: Int32) -> Int32:
    """Slot of partial result number `number` of the record."""
    return record.head if number == 0 else tail_slot_of(record, number)


@cute.jit
def tail_slot_of(record: Record, number: Int32) -> Int32:
    """Slot of partial result number `number` of the record, which is not its first."""
    return record.tail + (number - 1) * record.stride


@cute.jit
def _write(records: cute.Tensor, number: Int32, record: Record) -> None:
    words = cute.make_rmem_tensor(RECORD_BYTES // 4, Int32)
    words.fill(0)
    for i in cutlass.range_constexpr(len(Record._fields)):
        words[i] = record[i]
    if cute.arch.lane_idx() == 0:
        cute.autovec_copy(words, _place(records, number))


@cute.jit
def _place(records: cute.Tensor, number: Int32) -> cute.Tensor:
    place = records[number, None]
    return cute.make_tensor(aligned(place.iterator, 16), place.layout)


@cute.jit
def _by_unit(work: Work, records: cute.Tensor) -> Boolean:
    """Whether records are numbered by units rather than by workers."""
    return (work.terms.units * work.terms.group.value == records.shape[0]) & (work.terms.mixes == 0)
