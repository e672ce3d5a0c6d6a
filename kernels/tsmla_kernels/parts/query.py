"""A decode's query rows, whose pieces lie where their strides say, and how loaders bring a tile of them.

A piece is [batch, q_len, heads, columns] with free strides; row = token x heads + head of a request. Bulk copies reach
rows by a tensor map of *lines*: rows a constant stride apart. A row tile lies in one line. A line is all rows of a
request where tokens follow heads at the same stride, or the heads of one token where row tiles divide these. A query
that has neither is copied by a warp's lanes. In shared memory a piece is chunks of (rows, one swizzled row) either way.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import Numeric
from tsmla.identity.dtype import bytes_of
from tsmla.identity.row_format import RowFormat

from ..limits import VECTOR_BYTES, VECTOR_WORDS
from .alignment import aligned
from .division import Divisor, quotient
from .precision import numeric

REQUEST_LINES, TOKEN_LINES, NO_LINES = 0, 1, 2
"""What a line of a call's query is: the rows of a request, the heads of a token, or nothing."""
ROW_LANES = 4
"""Neighbouring lanes that copy one row: what they copy at a time are whole sectors of 32 bytes."""


class Map(NamedTuple):
    """A tensor map and the coordinates it takes."""

    atom: cute.CopyAtom
    view: cute.Tensor


class QueryRows(NamedTuple):
    """Pieces [batch, q_len, heads, columns], the latent one first, and what their lines are."""

    pieces: tuple[cute.Tensor, ...]
    lines: Int32


class Query(NamedTuple):
    """What a loader needs of the query: a tensor map of each piece, (columns of a chunk, rows, chunks, lines), and the
    rows themselves."""

    maps: tuple[Map, ...]
    rows: QueryRows


@dataclasses.dataclass(frozen=True)
class QueryTileLayout:
    """How `rows` query rows lie in shared memory: each piece is chunks of (rows, one swizzled row). A chunk of the
    latent piece has `latent_bytes` of each row; a rope piece is one chunk and lies behind the latent piece. `row` names
    the pieces of a query row, which may differ in dtype. The first `elsewhere` chunks of the latent piece are not in
    shared memory."""

    row: RowFormat
    rows: int
    latent_bytes: int
    elsewhere: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The pieces' names, in their order."""
        return tuple(piece.name for piece in self.row.pieces)

    @property
    def uniform(self) -> bool:
        """Whether all pieces have one dtype, so that they may be one tensor."""
        return len({piece.dtype for piece in self.row.pieces}) == 1

    @property
    def bytes(self) -> int:
        return self.rows * sum(self.piece_bytes(name) for name in self.names)

    def bytes_elsewhere(self, name: str) -> int:
        """Bytes of a row's piece that are not in shared memory."""
        return self.elsewhere * self.latent_bytes if name == "latent" else 0

    def piece_bytes(self, name: str) -> int:
        """Bytes of a row's piece that are in shared memory."""
        return self.row.piece(name).bytes - self.bytes_elsewhere(name)

    def first_column(self, name: str) -> int:
        """The first column of a piece that is in shared memory."""
        return self.bytes_elsewhere(name) // self.element_bytes(name)

    def line_bytes(self, name: str) -> int:
        """Bytes that a chunk of a piece has of each row."""
        return self.latent_bytes if name == "latent" else self.row.piece(name).bytes

    def offset(self, name: str) -> int:
        """The byte of the tile that a piece begins with."""
        return self.rows * sum(self.piece_bytes(before) for before in self.names[: self.names.index(name)])

    def element_bytes(self, name: str) -> int:
        return bytes_of(self.row.piece(name).dtype.bits)

    def dtype(self, name: str) -> type[Numeric]:
        return numeric(self.row.piece(name).dtype)

    def shape(self, name: str) -> tuple[int, int, int, int]:
        """Shape of a piece: (columns of a chunk, rows, chunks, 1)."""
        width = self.line_bytes(name) // self.element_bytes(name)
        return width, self.rows, self.piece_bytes(name) // self.line_bytes(name), 1

    def layout(self, name: str) -> cute.Layout:
        width, rows, _, _ = shape = self.shape(name)
        return cute.make_layout(shape, stride=(1, width, width * rows, 0))

    def swizzle(self, name: str) -> cute.Swizzle:
        width, *_ = self.shape(name)
        return cute.make_swizzle((width * self.element_bytes(name)).bit_length() - 5, 4, 3)


@cute.jit
def query_rows(given, tile: cutlass.Constexpr[QueryTileLayout]) -> QueryRows:
    """Find, on the host, the pieces of a call's query and their lines.

    given: `query` is whole rows, or only the latent piece, if it has just that one's columns; then `q_pe` is the other
    piece, if rows have one. It always is where pieces differ in dtype."""
    batch, q_len, heads, columns = given.query.shape
    latent_columns = tile.row.value_columns
    least = VECTOR_BYTES // tile.element_bytes("latent")
    request, token, head = _strides(given.query.shape, given.query, least)
    tokens_follow = token == heads * head
    requests_follow = request == q_len * token
    places = ((given.query.iterator, request, token, head),)
    for name in tile.names[1:]:
        whole = Boolean(columns != latent_columns)
        if const_expr(not tile.uniform):
            whole = Boolean(False)
        address = given.q_pe.iterator.toint()
        least = VECTOR_BYTES // tile.element_bytes(name)
        far, next_token, near = _strides(given.query.shape, given.q_pe, least)
        if whole:
            address = given.query.iterator.toint() + latent_columns * tile.element_bytes("latent")
            far, next_token, near = request, token, head
        tokens_follow = tokens_follow & (next_token == heads * near)
        requests_follow = requests_follow & (far == q_len * next_token)
        pointer = cute.make_ptr(tile.dtype(name), address, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        places = (*places, (pointer, far, next_token, near))

    lines = Int32(NO_LINES)
    if (q_len == 1) | (heads == 1) | tokens_follow:
        lines = Int32(REQUEST_LINES)
    elif (heads % tile.rows == 0) & ((batch == 1) | requests_follow):
        lines = Int32(TOKEN_LINES)

    def piece(name, pointer, *strides):
        shape = (batch, q_len, heads, tile.row.piece(name).columns)
        known = [cute.assume(stride, divby=VECTOR_BYTES // tile.element_bytes(name)) for stride in strides]
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(*known, 1)))

    return QueryRows(tuple(piece(name, *place) for name, place in zip(tile.names, places, strict=True)), lines)


@cute.jit
def _strides(shape: tuple, piece: cute.Tensor, least: cutlass.Constexpr[int]) -> tuple[Int64, Int64, Int64]:
    """Find a piece's strides of requests, tokens and heads. That of a single one means nothing and may be one that a
    tensor map cannot have: `least` takes its place."""
    batch, q_len, heads, _ = shape
    request, token, head = Int64(least), Int64(least), Int64(least)
    if heads > 1:
        head = Int64(piece.stride[2])
    if q_len > 1:
        token = Int64(piece.stride[1])
    if batch > 1:
        request = Int64(piece.stride[0])
    return request, token, head


@cute.jit
def query_of(rows: QueryRows, tile: cutlass.Constexpr[QueryTileLayout], load_op: cutlass.Constexpr) -> Query:
    """Make, on the host, tensor maps of the query's pieces for `load_op`."""
    named = zip(rows.pieces, tile.names, strict=True)
    return Query(tuple(_map_of(piece, rows.lines, name, tile, load_op) for piece, name in named), rows)


@cute.jit
def _map_of(
    piece: cute.Tensor,
    lines: Int32,
    name: cutlass.Constexpr,
    tile: cutlass.Constexpr[QueryTileLayout],
    load_op: cutlass.Constexpr,
) -> Map:
    batch, q_len, heads, _ = piece.shape
    far, token, near = (Int64(stride) for stride in piece.stride[:3])
    length, count = q_len * heads, Int32(batch)
    if heads == 1:
        near = token
    if lines == TOKEN_LINES:
        length, count, far = Int32(heads), batch * q_len, token
    width, _, chunks, _ = shape = tile.shape(name)
    near, far = (cute.assume(stride, divby=VECTOR_BYTES // tile.element_bytes(name)) for stride in (near, far))
    view = cute.make_tensor(
        piece.iterator + tile.first_column(name),
        cute.make_layout((width, length, chunks, count), stride=(1, near, width, far)),
    )
    layout = cute.make_composed_layout(tile.swizzle(name), 0, tile.layout(name))
    return Map(*cpasync.make_tiled_tma_atom(load_op, view, layout, shape))


@cute.jit
def copy_tile(
    query: Query,
    tile: cutlass.Constexpr[QueryTileLayout],
    targets: tuple,
    request: Int32,
    first_row: Int32,
    heads: Divisor,
    barrier: cute.Pointer,
):
    """Start copying a tile of a request's rows, from `first_row` of all rows on, to `targets`, one for each piece. The
    tile lies in one line; rows past the line are zeros."""
    line, place = _within(query.rows, request, first_row)
    if query.rows.lines == TOKEN_LINES:
        token = quotient(first_row, heads)
        line, place = token, first_row - token * heads.value
    for name, found, target in zip(tile.names, query.maps, targets, strict=True):
        source = cute.local_tile(cute.domain_offset((0, place, 0, line), found.view), tile.shape(name), (0,) * 4)
        to, of = cpasync.tma_partition(
            found.atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 4), cute.group_modes(source, 0, 4)
        )
        cute.copy(found.atom, of, to, tma_bar_ptr=barrier)


@cute.jit
def _within(rows: QueryRows, request: Int32, row: Int32) -> tuple[Int32, Int32]:
    """A row of all requests as one of a request. Where query tokens of all requests lie one behind the other, `rows`
    has one request."""
    batch, q_len, heads, _ = rows.pieces[0].shape
    line = cutlass.min(request, batch - 1)
    return line, row - line * (q_len * heads)


@cute.jit
def copy_rows(
    rows: QueryRows,
    tile: cutlass.Constexpr[QueryTileLayout],
    target: cute.Pointer,
    request: Int32,
    first_row: Int32,
    last_row: Int32,
    heads: Divisor,
):
    """Copy a tile of a request's rows, `first_row .. last_row` of all, by a warp's lanes, wait for it, and make it
    visible to the async proxy. Rows past `last_row` are copies of it. `target` is the tile's first 32-bit word."""
    _, last_row = _within(rows, request, last_row)
    request, first_row = _within(rows, request, first_row)
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=8 * VECTOR_BYTES
    )
    lane = cute.arch.lane_idx()
    lane_byte = (lane & ROW_LANES - 1) * VECTOR_BYTES
    step_bytes, step_rows = ROW_LANES * VECTOR_BYTES, 32 // ROW_LANES
    for index in cutlass.range(tile.rows // step_rows, unroll=1):
        row = index * step_rows + lane // ROW_LANES
        token, head = _token_and_head(cutlass.min(first_row + row, last_row), heads)
        for name, piece in zip(tile.names, rows.pieces, strict=True):
            row_bytes, offset = tile.line_bytes(name), tile.offset(name)
            source = _words_at(piece, request, token, head, tile.first_column(name))
            line = offset + row * row_bytes
            turned = (row * row_bytes >> 7 & row_bytes // VECTOR_BYTES - 1) * VECTOR_BYTES
            for step in cutlass.range_constexpr(tile.piece_bytes(name) // step_bytes):
                chunk, within = divmod(step * step_bytes, row_bytes)
                to = chunk * tile.rows * row_bytes + line + ((within + lane_byte) ^ turned)
                cute.copy(
                    atom,
                    _vector(source + (step * step_bytes + lane_byte) // 4),
                    _vector(target + to // 4),
                )
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


@cute.jit
def latent_words(rows: QueryRows, request: Int32, row: Int32, heads: Divisor) -> cute.Pointer:
    """The first 32-bit word of a row's latent piece; `row` is one of all rows."""
    request, row = _within(rows, request, row)
    return _words_at(rows.pieces[0], request, *_token_and_head(row, heads), 0)


def _token_and_head(row: Int32, heads: Divisor) -> tuple[Int32, Int32]:
    """The query token and the head that a request's row is of."""
    token = quotient(row, heads)
    return token, row - token * heads.value


def _words_at(piece: cute.Tensor, request: Int32, token: Int32, head: Int32, column: int) -> cute.Pointer:
    start = cute.domain_offset((request, token, head, column), piece).iterator
    return cute.recast_ptr(aligned(start, VECTOR_BYTES), dtype=Int32)


@cute.jit
def _vector(words: cute.Pointer) -> cute.Tensor:
    return cute.make_tensor(aligned(words, VECTOR_BYTES), VECTOR_WORDS)
