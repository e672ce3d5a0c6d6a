"""The calls that `tsmla selftest` makes of each operator, as data: short ones, and every edge of the contracts.

Short cases are small enough for the emulator. Standard library only.
"""

from __future__ import annotations

import dataclasses

from ..identity.variant import DecodeVariant, PrefillVariant, Variant


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """One ragged pack.

    heads: of query and of key.
    magnitude: of query, key and value.
    strided: key and value are slices of one tensor, query and output of wider ones.
    factors: k_scale, v_scale, output_scale.
    sinks: heads have sinks. lse_includes_sink: as the operator has it.
    pieces: query and key are given in two pieces, if the kernel's dimensions have them.
    merges: into an earlier result, if the kernel has an LSE. The first sequence then has at least as many keys as query
        tokens.
    unused_keys: rows of key and value behind the last sequence. Hopper takes kernels for long sequences by the rows of
        these tensors.
    one_sign: all scores are 0, and values positive: what a sum over many keys loses adds up.
    """

    name: str
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    heads: tuple[int, int] = (2, 1)
    magnitude: float = 1.0
    strided: bool = False
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    sinks: bool = False
    lse_includes_sink: bool = False
    pieces: bool = False
    merges: bool = False
    unused_keys: int = 0
    one_sign: bool = False
    short: bool = False


@dataclasses.dataclass(frozen=True)
class MaskedCase(PrefillCase):
    """One ragged pack whose queries have a key mask.

    causal: whether the call is, too.
    seen: the share of keys that a query sees, of those blocks of 64 keys of which it sees any: half of them. 1: all
        keys.
    """

    causal: bool = True
    seen: float = 0.3


@dataclasses.dataclass(frozen=True)
class DecodeCase:
    """One batch.

    lengths: keys of each request over all ranks.
    q_lens: query tokens of each request in a pack. Where it is empty, each has q_len.
    ranks: how many share the keys, in blocks of `interleave` keys; the case is the last one's.
    visible: each query token also has a limit of its own.
    sinks: heads have sinks. lse_includes_sink, batch_invariant: as the operator has them.
    pieces: the query is given in two pieces.
    apart: the cache is two tensors, where rows of one dtype have a rope piece.
    one_sign: all scores are 0, and values positive: what a sum over many keys loses adds up.
    """

    name: str
    lengths: tuple[int, ...]
    q_len: int = 1
    heads: int = 16
    page: int = 64
    causal: bool = True
    window: int = -1
    ranks: int = 1
    interleave: int = 1
    visible: bool = False
    magnitude: float = 1.0
    output_scale: float = 1.0
    sinks: bool = False
    lse_includes_sink: bool = False
    q_lens: tuple[int, ...] = ()
    pieces: bool = False
    apart: bool = False
    batch_invariant: bool = False
    one_sign: bool = False
    short: bool = False

    @property
    def own_q_lens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return self.q_lens or (self.q_len,) * len(self.lengths)


@dataclasses.dataclass(frozen=True)
class ChosenCase:
    """Query tokens that choose their keys.

    packed: the query is [tokens, heads, 576].
    lengths: how many indices of each token's list count; all where it is empty.
    pages, page: of the cache, and rows of a page.
    outside: the share of indices that name no key. front: so many of each list's first name none.
    distinct: keys are among so many first ones of the cache; among all with 0.
    sinks: heads have sinks. lse_includes_sink, batch_invariant: as the operator has them.
    pieces, apart, one_sign: as in a `DecodeCase`.
    """

    name: str
    top_k: int
    batch: int = 1
    q_len: int = 1
    heads: int = 16
    packed: bool = False
    lengths: tuple[int, ...] = ()
    pages: int = 12
    page: int = 64
    outside: float = 0.1
    front: int = 0
    distinct: int = 0
    magnitude: float = 1.0
    output_scale: float = 1.0
    sinks: bool = False
    lse_includes_sink: bool = False
    pieces: bool = False
    apart: bool = False
    batch_invariant: bool = False
    one_sign: bool = False
    short: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len


@dataclasses.dataclass(frozen=True)
class PackCase:
    """One pack.

    patterns: inputs are all 16-bit patterns.
    strided: inputs are slices, outputs have gaps.
    """

    name: str
    tokens: int
    heads: int
    scales: tuple[float, float] = (1.0, 1.0)
    patterns: bool = False
    strided: bool = False
    short: bool = False


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """Tokens that are written to a cache, or read from it.

    page: rows of a page.
    scale: of a cache whose format has one for the whole.
    patterns: tokens are all 16-bit patterns.
    tables: rows are read by page tables, not by slots. requests: whose tables these are.
    power_of_two: scales of rows are rounded to powers of two.
    strided: rows lie apart. pages_apart: pages lie apart by a row.
    rotated: rope parts are rotated when they are written, by a table of their dtype: pairs are "neighbours", or lie in
        the two "halves", where the table is float32. Empty: they are not.
    """

    name: str
    tokens: int
    pages: int
    page: int
    scale: float = 1.0
    patterns: bool = False
    tables: bool = False
    requests: int = 3
    power_of_two: bool = True
    strided: bool = False
    pages_apart: bool = False
    rotated: str = ""
    short: bool = False


@dataclasses.dataclass(frozen=True)
class MaskCase:
    """Lists of chosen keys that become a mask.

    lengths: how many indices of each token's list count; all where it is empty.
    outside: the share of indices that name no key.
    distinct: keys are among so many first ones; among all with 0.
    strided: lists and words are slices of wider ones.
    edges: the last eight indices that count are the first and last keys of all and of what the kernel does at a time,
        and indices that name no key; so is the one behind them. No others name a key.
    """

    name: str
    top_k: int
    tokens: int
    keys: int
    lengths: tuple[int, ...] = ()
    outside: float = 0.1
    distinct: int = 0
    strided: bool = False
    edges: bool = False
    short: bool = False


@dataclasses.dataclass(frozen=True)
class QueryCase:
    """A query to quantise.

    patterns: its elements are all 16-bit patterns.
    power_of_two: scales are rounded to powers of two.
    strided: it is given in pieces, and rows of results lie apart.
    """

    name: str
    batch: int
    q_len: int
    heads: int
    patterns: bool = False
    power_of_two: bool = True
    strided: bool = False
    short: bool = False

    @property
    def tokens(self) -> int:
        """Rows of the query: what `CacheCase` calls tokens."""
        return self.batch * self.q_len * self.heads


Case = PrefillCase | DecodeCase | ChosenCase | PackCase | CacheCase | QueryCase | MaskCase

_PREFILL = (
    PrefillCase(
        "edges of tiles, empty sequences, strided", (1, 65, 0, 129), (1, 63, 77, 200), strided=True, short=True
    ),
    PrefillCase("more queries than keys, no keys, sinks", (130, 3), (40, 0), sinks=True, short=True),
    PrefillCase("large scores", (64,), (257,), (1, 1), magnitude=6.0, short=True),
    PrefillCase("pieces, merged", (65, 0, 3), (66, 40, 0), pieces=True, merges=True, short=True),
    PrefillCase("long by the rows of the pack", (130,), (200,), unused_keys=50_000, short=True),
    PrefillCase("around half a tile", (63, 64, 65), (65, 63, 64)),
    PrefillCase("around a tile", (127, 128, 129), (128, 129, 127), (4, 2)),
    PrefillCase("around two tiles", (255, 256, 257), (257, 255, 256)),
    PrefillCase("far more queries than keys", (300, 129, 257), (100, 1, 16)),
    PrefillCase("empty sequences", (1, 0, 130, 5, 0), (1, 77, 0, 300, 0), (4, 2), strided=True),
    PrefillCase("no keys at all", (3, 200), (0, 0)),
    PrefillCase("several tiles", (513, 1000), (1513, 999), (4, 2)),
    PrefillCase("many sequences", tuple(i * 29 % 151 for i in range(40)), tuple(i * 53 % 331 for i in range(40))),
    PrefillCase("a long context", (130,), (8192,), (2, 2)),
    PrefillCase("values of one sign, a long context", (130,), (32768,), (1, 1), one_sign=True),
    PrefillCase("one head", (200, 90), (300, 90), (1, 1)),
    PrefillCase("eight query heads for a key head", (200, 90), (300, 90), (8, 1)),
    PrefillCase("four query heads for a key head", (200, 90), (300, 90), (12, 3), strided=True),
    PrefillCase("128 heads", (200, 90), (300, 90), (128, 128)),
    PrefillCase("larger scores", (300,), (900,), (2, 2), magnitude=6.0),
    PrefillCase("sinks", (200, 3, 90), (300, 0, 90), (12, 3), factors=(1.0, 2.0, 0.5), sinks=True),
    PrefillCase("sinks in the LSE", (200, 3, 90), (300, 0, 90), (12, 3), sinks=True, lse_includes_sink=True),
    PrefillCase("pieces", (300, 129, 257), (900, 1, 300), (4, 4), pieces=True),
    PrefillCase("pieces, eight query heads for a key head", (200, 90), (300, 90), (8, 1), pieces=True),
    PrefillCase("merged", (513, 90, 130), (1513, 0, 63), (12, 3), strided=True, merges=True),
    PrefillCase("scales", (140, 2), (700, 0), factors=(0.375, 4.0, -0.125)),
    PrefillCase(
        "long by the rows of the pack, merged, sinks",
        (513, 90, 130),
        (1513, 0, 63),
        (4, 1),
        factors=(1.0, 2.0, 0.5),
        strided=True,
        sinks=True,
        pieces=True,
        merges=True,
        unused_keys=83_000,
    ),
)

_MASKED = (
    MaskedCase("edges of tiles, empty sequences, strided", (1, 65, 0, 129), (1, 63, 77, 200), strided=True, short=True),
    MaskedCase("single keys, sinks", (130, 3), (300, 0), sinks=True, causal=False, seen=0.01, short=True),
    MaskedCase("no key at all, merged", (65, 0, 3), (66, 40, 0), merges=True, seen=0.0, short=True),
    MaskedCase("every key, pieces", (130,), (270,), pieces=True, seen=1.0, short=True),
    MaskedCase("large scores", (64,), (257,), (1, 1), magnitude=6.0, causal=False),
    MaskedCase("around tiles", (127, 128, 129, 257), (257, 129, 127, 96), (4, 2)),
    MaskedCase("several tiles", (513, 1000), (1513, 999), (4, 2), seen=0.05),
    MaskedCase("several tiles, every key", (513, 1000), (1513, 999), (4, 2), causal=False, seen=1.0),
    MaskedCase("many sequences", tuple(i * 29 % 151 for i in range(40)), tuple(i * 53 % 331 for i in range(40))),
    MaskedCase("a long context, few keys", (130, 5), (8192, 33), (2, 2), seen=0.001),
    MaskedCase("values of one sign", (130,), (8192,), (1, 1), causal=False, seen=1.0, one_sign=True),
    MaskedCase("128 heads", (200, 90), (300, 90), (128, 128), causal=False),
    MaskedCase(
        "merged, sinks in the LSE", (513, 90, 130), (1513, 0, 63), (12, 3), sinks=True, merges=True, strided=True
    ),
    MaskedCase("scales", (140, 2), (700, 0), factors=(0.375, 4.0, -0.125)),
)

_DECODE = (
    DecodeCase("lengths around a tile", (0, 1, 63, 64, 65), page=16, short=True),
    DecodeCase("several row tiles, window", (130, 70, 3), q_len=2, heads=40, window=66, output_scale=0.5, short=True),
    DecodeCase(
        "one split request, full, sinks", (1100,), q_len=2, heads=8, page=128, causal=False, sinks=True, short=True
    ),
    DecodeCase("context parallel", (201, 2, 64), q_len=3, heads=8, page=32, ranks=2, interleave=16, short=True),
    DecodeCase("a pack, pieces", (130, 70, 0, 3, 40), q_lens=(1, 9, 2, 0, 3), heads=8, pieces=True, short=True),
    DecodeCase("batch-invariant pack", (300, 65), q_lens=(3, 1), heads=8, batch_invariant=True, short=True),
    DecodeCase("lengths around tiles", (127, 128, 129, 255, 256, 257, 4097), page=64),
    *(DecodeCase(f"pages of {page}", (300, 1, 0, 129, 2000), q_len=3, page=page) for page in (16, 32, 64, 128)),
    DecodeCase("one head", (700, 65, 3), heads=1),
    DecodeCase("one head, 8 query tokens", (700, 65, 3), q_len=8, heads=1),
    DecodeCase("8 query tokens", (700, 65, 3, 4097), q_len=8),
    DecodeCase("64 heads", (700, 65, 3, 4097), heads=64),
    DecodeCase("64 heads, 8 query tokens", (700, 65, 3), q_len=8, heads=64),
    DecodeCase("128 heads", (700, 65, 3, 4097), heads=128),
    DecodeCase("128 heads, 8 query tokens", (900, 12, 130), q_len=8, heads=128),
    DecodeCase("129 rows", (300, 12), heads=129),
    DecodeCase("fewer keys than query tokens", (0, 1, 3, 200), q_len=4, heads=12),
    DecodeCase("one long request", (40000,)),
    DecodeCase("long and short requests", (16512, 3, 0, 700, 8192), q_len=2),
    DecodeCase("more requests than the GPU has SMs", tuple(i * 131 % 400 for i in range(300)), heads=8),
    DecodeCase("full", (3, 70, 500, 9000), q_len=4, heads=24, causal=False),
    DecodeCase("window of one", (3, 70, 500, 9000), q_len=4, heads=24, window=0),
    DecodeCase("window", (3, 70, 500, 9000), q_len=4, heads=24, window=4096),
    DecodeCase("limits of query tokens", (1, 64, 390, 0, 200), q_len=3, causal=False, visible=True),
    DecodeCase("sinks", (3, 70, 0, 500, 9000), q_len=4, heads=24, output_scale=-2.0, sinks=True),
    DecodeCase("sinks in the LSE", (3, 70, 0, 500, 9000), q_len=3, heads=48, sinks=True, lse_includes_sink=True),
    DecodeCase("four ranks", (4001, 2, 64, 0, 513), q_len=3, heads=24, ranks=4),
    DecodeCase("two ranks by blocks, window", (4001, 2, 64, 0, 513), q_len=3, ranks=2, interleave=64, window=700),
    DecodeCase("pieces", (700, 65, 3, 4097), q_len=2, heads=64, pieces=True),
    DecodeCase("pieces, 128 heads", (700, 65, 3, 4097), heads=128, pieces=True),
    DecodeCase("a pack of one token each", (700, 65, 3, 4097), q_lens=(1, 1, 1, 1)),
    DecodeCase("a pack, one long query among short ones", (4097, 700, 8192, 300), q_lens=(1, 130, 1, 2), pieces=True),
    DecodeCase("a pack, one head", (700, 0, 65, 3000), q_lens=(70, 5, 0, 1), heads=1),
    DecodeCase("a pack, 128 heads, window, sinks", (900, 12), q_lens=(17, 1), heads=128, window=66, sinks=True),
    DecodeCase("a pack, full", (900, 12, 4097), q_lens=(9, 30, 1), heads=24, causal=False),
    DecodeCase("a pack, two ranks by blocks", (4001, 2, 640), q_lens=(3, 1, 64), ranks=2, interleave=64),
    DecodeCase(
        "a pack of more requests than the GPU has SMs",
        tuple(i * 131 % 400 for i in range(300)),
        q_lens=tuple(i * 7 % 4 for i in range(300)),
        heads=8,
    ),
    DecodeCase("batch-invariant", (3, 70, 500, 9000), q_len=4, heads=24, batch_invariant=True),
    DecodeCase("batch-invariant pack, 128 heads", (4097, 3, 700), q_lens=(1, 2, 9), heads=128, batch_invariant=True),
    DecodeCase("large scores", (900, 5000), q_len=2, magnitude=2.5, output_scale=-2.0),
    DecodeCase("values of one sign, not split", (16384, 3), heads=24, batch_invariant=True, one_sign=True),
)

_CHOSEN = (
    ChosenCase(
        "lengths around a tile, pages of 61",
        130,
        7,
        lengths=(0, 1, 63, 64, 65, 130, 200),
        page=61,
        outside=0.3,
        short=True,
    ),
    ChosenCase("several tokens and row tiles, pieces, sinks", 70, 2, 2, 65, pieces=True, sinks=True, short=True),
    ChosenCase("packed, pages of one key, chosen twice", 100, 3, heads=8, packed=True, pages=50, page=1, short=True),
    ChosenCase("two tensors, pages of three keys", 130, 2, heads=24, pages=40, page=3, apart=True, short=True),
    ChosenCase("one split list, a first tile of none", 600, 1, heads=8, front=64, output_scale=0.5, short=True),
    ChosenCase("no key at all", 64, 3, heads=1, outside=1.0, lengths=(64, 0, -5), short=True),
    *(
        ChosenCase(f"2048 keys, {heads} heads", 2048, 3, 2, heads, pages=100, pieces=heads == 16)
        for heads in (1, 2, 8, 16, 24, 64, 96, 128)
    ),
    *(ChosenCase(f"pages of {page}", 300, 4, 3, pages=1 + 900 // page, page=page) for page in (1, 2, 16, 69, 128, 576)),
    ChosenCase("129 rows", 300, 2, heads=129),
    ChosenCase("one long list", 40000, heads=16, pages=800),
    ChosenCase("long and short lists", 8200, 5, 1, 16, lengths=(8200, 3, 0, 700, 8191), pages=200),
    ChosenCase("more tokens than the GPU has SMs", 100, 150, 2, 8, lengths=tuple(i * 31 % 120 for i in range(300))),
    ChosenCase("one key many times", 2048, 3, distinct=1, outside=0.0),
    ChosenCase("a few keys many times", 700, 3, 2, 64, distinct=5),
    ChosenCase("nearly all indices outside", 2048, 4, heads=64, outside=0.99),
    ChosenCase("first tiles of none", 700, 4, heads=24, front=320),
    ChosenCase("lists without indices", 0, 3),
    ChosenCase("sinks", 500, 2, 2, 24, lengths=(500, 0, 1, 70), output_scale=-2.0, sinks=True),
    ChosenCase("sinks in the LSE", 500, 2, 2, 48, lengths=(500, 0, 1, 70), sinks=True, lse_includes_sink=True),
    ChosenCase("packed, pieces, 128 heads", 700, 5, heads=128, packed=True, pieces=True),
    ChosenCase("two tensors, pieces, 128 heads", 2048, 3, heads=128, pages=100, pieces=True, apart=True),
    ChosenCase("batch-invariant", 3000, 4, 1, 24, lengths=(3, 70, 500, 3000), batch_invariant=True),
    ChosenCase("large scores", 900, 2, 2, magnitude=2.5, output_scale=-2.0),
    ChosenCase(
        "values of one sign, not split", 8192, 3, 1, 24, pages=200, outside=0.0, batch_invariant=True, one_sign=True
    ),
)

_SMALL_PAGES = (
    DecodeCase("lengths around a tile, pages of 8", (0, 1, 63, 64, 65), page=8, short=True),
    DecodeCase(
        "a pack, pages of 2, two tensors",
        (130, 70, 0, 3, 40),
        q_lens=(1, 9, 2, 0, 3),
        heads=8,
        page=2,
        pieces=True,
        apart=True,
        short=True,
    ),
    DecodeCase("two ranks, pages of one key", (201, 2, 64), q_len=3, heads=8, page=1, ranks=2, interleave=16),
    DecodeCase("pages of 4, window, sinks", (300, 1, 0, 129, 2000), q_len=3, heads=24, page=4, window=66, sinks=True),
    DecodeCase("pages of 2, 128 heads, two tokens", (900, 12, 4097), q_len=2, heads=128, page=2),
    DecodeCase("one long request, pages of one key", (40000,), page=1),
    DecodeCase("limits of query tokens, pages of 8", (1, 64, 390, 0, 200), q_len=3, page=8, causal=False, visible=True),
    DecodeCase("a pack, pages of one key, one long query", (4097, 700, 8192), q_lens=(1, 130, 2), page=1, apart=True),
    DecodeCase("a pack, pages of 4, 128 heads", (900, 12), q_lens=(17, 1), heads=128, page=4, sinks=True),
    DecodeCase(
        "a pack of more requests than the GPU has SMs, pages of 8",
        tuple(i * 131 % 400 for i in range(300)),
        q_lens=tuple(i * 7 % 4 for i in range(300)),
        heads=8,
        page=8,
    ),
    DecodeCase("batch-invariant pack, pages of 4", (4097, 3, 700), q_lens=(1, 2, 9), page=4, batch_invariant=True),
)

_PACK = (
    PackCase("strided", 37, 5, (0.5, 3.0), strided=True, short=True),
    PackCase("one token", 1, 1, short=True),
    *(PackCase(f"{t} tokens, {h} heads", t, h, (0.3, 7.0)) for t in (7, 128, 1000) for h in (1, 3, 16, 128)),
    PackCase("128 heads, strided", 300, 128, (0.3, 7.0), strided=True),
    *(PackCase(f"every number times {s:g}", 64, 8, (s, s), patterns=True) for s in (1.0, -0.37, 3e-6, 1e30, 0.0)),
)

_CACHE = (
    CacheCase("strided, pages of 5", 37, 9, 5, 0.5, tables=True, strided=True, short=True),
    CacheCase("arbitrary scales", 33, 3, 16, 3e-3, power_of_two=False, short=True),
    CacheCase("rotated", 37, 9, 5, 0.5, rotated="halves", short=True),
    CacheCase("rotated, neighbours, strided", 90, 31, 5, 0.5, power_of_two=False, strided=True, rotated="neighbours"),
    CacheCase("every number", 1024, 40, 64, 0.37, patterns=True),
    CacheCase("every number, arbitrary scales", 1024, 40, 64, 1e-30, patterns=True, power_of_two=False),
    *(CacheCase(f"pages of {page}", 700, 900 // page, page, tables=True) for page in (1, 32, 64, 128)),
    CacheCase("slots, pages of 5", 90, 31, 5, pages_apart=True),
    CacheCase("11 requests, pages of 5", 90, 31, 5, tables=True, requests=11),
    CacheCase("8192 tokens", 8192, 200, 64, 7.0, strided=True),
)

_QUANTIZE_Q = (
    QueryCase("strided", 3, 2, 7, strided=True, short=True),
    QueryCase("arbitrary scales", 1, 1, 5, power_of_two=False, short=True),
    QueryCase("every number", 8, 1, 128, patterns=True),
    QueryCase("every number, arbitrary scales", 8, 1, 128, patterns=True, power_of_two=False),
    QueryCase("128 requests, two tokens, 16 heads", 128, 2, 16, strided=True),
)

_KEY_MASK = (
    MaskCase("lengths, words of one bit", 300, 7, 641, lengths=(0, -3, 1, 31, 300, 999, 256), strided=True, short=True),
    MaskCase(
        "edges", 2400, 9, 131072 + 97, lengths=tuple(256 * token + 8 for token in range(9)), edges=True, short=True
    ),
    MaskCase("one index counts", 40, 1, 50, lengths=(1,), outside=0.0, short=True),
    *(MaskCase(f"{top_k} indices and no more memory", top_k, 1, 5000, short=True) for top_k in range(256, 2049, 256)),
    MaskCase("two passes", 2048, 2, 131072 + 97, outside=0.5),
    MaskCase("2048 of 65536 keys", 2048, 300, 65536),
    MaskCase("2048 of 8192 keys", 2048, 4096, 8192),
    MaskCase("one key many times", 2048, 3, 33, distinct=1, outside=0.0),
    MaskCase("neighbours", 2048, 5, 4096, distinct=96),
    MaskCase("a list beyond a round of loads", 5000, 3, 5001, strided=True),
    MaskCase("one key and one index", 1, 200, 1),
    MaskCase("nearly all indices outside", 2048, 40, 4000, outside=0.99),
    MaskCase("lists without indices", 0, 3, 100),
    MaskCase("a million keys", 2048, 9, 1 << 20),
)

_ALL: dict[str, tuple[Case, ...]] = {
    "prefill": _PREFILL,
    "masked": _MASKED,
    "decode": _DECODE,
    "gathered": (*_CHOSEN, *_SMALL_PAGES),
    "pack": _PACK,
    "write_cache": _CACHE,
    "read_cache": _CACHE,
    "quantize_q": _QUANTIZE_Q,
    "key_mask": _KEY_MASK,
}


KINDS = tuple(_ALL)
"""Families of operators; "masked": prefills with a key mask; "gathered": decodes that copy keys one by one, those
of lists and those over pages of few keys."""


def kind_of(variant: Variant) -> str:
    """Return which of KINDS has the cases of a variant."""
    if isinstance(variant, PrefillVariant) and variant.masked:
        return "masked"
    return "gathered" if isinstance(variant, DecodeVariant) and variant.gathers else variant.family


def cases_of(kind: str, *, full: bool) -> tuple[Case, ...]:
    """Return the cases of one of KINDS: all of them, or the short ones."""
    return tuple(case for case in _ALL[kind] if full or case.short)
