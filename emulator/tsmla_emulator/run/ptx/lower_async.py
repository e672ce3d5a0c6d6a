"""Encodes barriers in memory, bulk copies and the matrix instructions of Hopper (wgmma) and Blackwell (tcgen05)."""

from __future__ import annotations

import re

from .encoding import SPACES, Constant, Encoded, Encoder, Reference
from .model import Address, Immediate, Operand, Pair, Register, Vector

MULTICAST, PAIR, GATHER4, RELAXED = 1 << 16, 1 << 17, 1 << 18, 1 << 19
ELEMENTS = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 3, "e5m2": 4, "f32": 5}
WGMMA_DEPTHS = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "f32": 0}
FILLS = 1 << 6
"""Tells a tcgen05.cp from a product, among the flags of what tensor cores execute."""
KINDS = {"kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2}
COPIES = {
    ("128x256b",): 0, ("128x128b",): 1, ("4x256b",): 2, ("64x128b", "warpx2::02_13"): 3,
    ("64x128b", "warpx2::01_23"): 4, ("32x128b", "warpx4"): 5,
}  # fmt: skip
"""Shape and copies of a tcgen05.cp -> their number."""
RESPONSES = {
    "query_cancel.get_first_ctaid::x.b32.b128": 0, "query_cancel.get_first_ctaid::y.b32.b128": 1,
    "query_cancel.get_first_ctaid::z.b32.b128": 2, "query_cancel.is_canceled.pred.b128": 3,
}  # fmt: skip
"""Queries of a cluster launch control response -> their number."""
SHAPES = {"32x32b": 0, "16x64b": 1, "16x128b": 2, "16x256b": 3}
_REGISTERS_PER_REPEAT = {0: 1, 1: 1, 2: 2, 3: 4}


def _space(encoder: Encoder, default: str = "shared") -> int:
    for part in encoder.parts:
        if part in SPACES:
            return SPACES[part]
    return SPACES[default]


def _mbarrier(encoder: Encoder) -> Encoded:
    action = encoder.parts[1]
    operands = list(encoder.operands)
    flags = _space(encoder) | (RELAXED if "relaxed" in encoder.parts else 0)
    if action in ("try_wait", "test_wait"):
        target = operands.pop(0)
        if isinstance(target, Pair):
            raise encoder.refuse()
        base, offset, wide = encoder.address(operands.pop(0))
        kind = "b32" if "parity" in encoder.parts else "b64"
        return encoder.build(
            "mbarrier_try",
            d=encoder.destination(target),
            a=base,
            imm=offset,
            b=encoder.source(operands[0], kind),
            flags=flags | wide,
            extra=int(kind == "b64") | (2 if action == "test_wait" else 0),
        )
    if action == "arrive":
        if {"noComplete", "drop"} & set(encoder.parts):
            raise encoder.refuse()
        result = encoder.destination(operands.pop(0)) if not isinstance(operands[0], Address) else None
        base, offset, wide = encoder.address(operands.pop(0))
        expects = "expect_tx" in encoder.parts
        value = encoder.source(operands[0]) if operands else Constant(1)
        return encoder.build(
            "mbarrier_arrive", d=result, a=base, imm=offset, b=value, flags=flags | wide, extra=int(expects)
        )
    names = {"init": "init", "inval": "invalidate", "expect_tx": "expect", "complete_tx": "complete"}
    if action not in names:
        raise encoder.refuse()
    base, offset, wide = encoder.address(operands.pop(0))
    value = encoder.source(operands[0]) if operands else None
    return encoder.build(f"mbarrier_{names[action]}", a=base, imm=offset, b=value, flags=flags | wide)


def _copy(encoder: Encoder) -> Encoded:
    if encoder.parts[1] != "async":
        raise encoder.refuse()
    if encoder.parts[2] == "bulk":
        return _bulk(encoder)
    if encoder.parts[2] == "commit_group":
        return encoder.build("cp_async_commit")
    if encoder.parts[2] in ("wait_group", "wait_all"):
        allowed = encoder.number(encoder.operands[0]) if encoder.operands else 0
        return encoder.build("cp_async_wait", imm=allowed, extra=int(encoder.parts[2] == "wait_all"))
    if encoder.parts[2] == "mbarrier":
        base, offset, wide = encoder.address(encoder.operands[0])
        return encoder.build(
            "cp_async_arrive", a=base, imm=offset, flags=wide | SPACES["shared"], extra=int("noinc" in encoder.parts)
        )
    if encoder.parts[2] not in ("ca", "cg"):
        raise encoder.refuse()
    base, offset, wide = encoder.address(encoder.operands[0])
    source, source_offset, source_wide = encoder.address(encoder.operands[1])
    if not source_wide:
        raise encoder.refuse()
    size = encoder.number(encoder.operands[2])
    rest = encoder.operands[3:]
    if "L2::cache_hint" in encoder.parts:
        rest = rest[:-1]
    if size not in ((16,) if encoder.parts[2] == "cg" else (4, 8, 16)) or len(rest) > 1:
        raise encoder.refuse()
    if rest and isinstance(rest[0], Register) and rest[0].kind == "pred":
        raise encoder.refuse(f"a predicate that ignores the source in {encoder.instruction.text!r}")
    limit = encoder.source(rest[0]) if rest else None
    return encoder.build(
        "cp_async",
        a=base,
        imm=offset,
        b=source,
        extra=size,
        c=limit,
        flags=wide | SPACES["shared"],
        e=Constant(source_offset & 0xFFFFFFFF),
    )


def _bulk(encoder: Encoder) -> Encoded:
    parts = encoder.parts[3:]
    if parts[0] == "commit_group":
        return encoder.build("bulk_commit")
    if parts[0] == "wait_group":
        return encoder.build("bulk_wait", imm=encoder.number(encoder.operands[0]), extra=int("read" in parts))
    if parts[0] == "tensor":
        return _bulk_tensor(encoder, parts[1:])
    spaces = [p for p in parts if p in SPACES]
    known = {"mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint", *spaces}
    if set(parts) - known or len(spaces) != 2:
        raise encoder.refuse()
    to, to_offset, _ = encoder.address(encoder.operands[0])
    source, source_offset, _ = encoder.address(encoder.operands[1])
    size = encoder.source(encoder.operands[2])
    barrier: tuple[Reference, int] = (None, 0)
    if "mbarrier::complete_tx::bytes" in parts:
        barrier = encoder.address(encoder.operands[3])[:2]
    offsets = (Constant(to_offset & 0xFFFFFFFF), Constant(source_offset & 0xFFFFFFFF), Constant(barrier[1]))
    return encoder.build(
        "bulk_copy",
        a=to,
        b=source,
        c=size,
        e=barrier[0],
        items=offsets,
        flags=SPACES[spaces[0]] | SPACES[spaces[1]] << 4,
    )


def _bulk_tensor(encoder: Encoder, parts: list[str]) -> Encoded:
    spaces = [p for p in parts if p in SPACES]
    known = {"tile", "tile::gather4", "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint",
             "multicast::cluster", "cta_group::1", "cta_group::2", *spaces}  # fmt: skip
    if set(parts[1:]) - known or len(spaces) != 2 or not re.fullmatch("[1-5]d", parts[0]):
        raise encoder.refuse()
    load, gathers = spaces[1] == "global", "tile::gather4" in parts
    rank = int(parts[0][0])
    if gathers and (not load or rank != 2):
        raise encoder.refuse()
    memory, tensor = encoder.operands[:2] if load else encoder.operands[1::-1]
    base, offset, _ = encoder.address(memory)
    if not isinstance(tensor, Address) or len(tensor.coordinates) != (5 if gathers else rank):
        raise encoder.refuse()
    map_base, map_offset, _ = encoder.address(Address(tensor.base, tensor.offset))
    coordinates = tuple(encoder.source(c) for c in tensor.coordinates)
    if not load:
        if spaces != ["global", "shared::cta"]:
            raise encoder.refuse()
        return encoder.build(
            "bulk_store_tensor", a=base, imm=offset, b=map_base, items=coordinates, extra=rank, e=Constant(map_offset)
        )
    barrier, barrier_offset, _ = encoder.address(encoder.operands[2])
    flags = SPACES[spaces[0]] | (PAIR if "cta_group::2" in parts else 0) | (GATHER4 if gathers else 0)
    mask = None
    if "multicast::cluster" in parts:
        flags |= MULTICAST
        mask = encoder.source(encoder.operands[3], "b16")
    items = (*coordinates, Constant(map_offset), Constant(barrier_offset & 0xFFFFFFFF))
    return encoder.build(
        "bulk_load_tensor", a=base, imm=offset, b=map_base, c=barrier, e=mask, items=items, flags=flags, extra=rank
    )


def _cluster_launch(encoder: Encoder) -> Encoded:
    """Encode a cluster launch control request, or what its response says."""
    query = ".".join(encoder.parts[1:])
    if query in RESPONSES:
        response = encoder.source(encoder.operands[1], "b128")
        return encoder.build(
            "query_cancel", d=encoder.destination(encoder.operands[0]), a=response, extra=RESPONSES[query]
        )
    known = {"try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all", "b128"}
    if set(encoder.parts[1:]) - known:
        raise encoder.refuse()
    base, offset, wide = encoder.address(encoder.operands[0])
    barrier, barrier_offset, _ = encoder.address(encoder.operands[1])
    flags = wide | SPACES["shared"] | (MULTICAST if "multicast::cluster::all" in encoder.parts else 0)
    items = (Constant(barrier_offset & 0xFFFFFFFF),)
    return encoder.build("cancel_cluster", a=base, imm=offset, b=barrier, items=items, flags=flags)


def _wgmma(encoder: Encoder) -> Encoded:
    action = encoder.parts[1]
    if action == "fence":
        return encoder.build("wgmma_fence")
    if action == "commit_group":
        return encoder.build("wgmma_commit")
    if action == "wait_group":
        allowed = encoder.number(encoder.operands[0])
        return encoder.build("wgmma_wait", imm=allowed, awaits_all=allowed == 0)
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", encoder.parts[4]) if len(encoder.parts) == 8 else None
    kinds = encoder.parts[5:]
    if action != "mma_async" or shape is None or kinds[0] != "f32" or any(k not in ELEMENTS for k in kinds):
        raise encoder.refuse()
    columns, depth = int(shape[1]), int(shape[2])
    if columns not in range(8, 257, 8) or {WGMMA_DEPTHS[kind] for kind in kinds[1:]} != {depth}:
        raise encoder.refuse()
    accumulators, a, b, scale, *signs = encoder.operands
    if not isinstance(accumulators, Vector) or len(accumulators.items) != columns // 2:
        raise encoder.refuse()
    results = tuple(map(encoder.destination, accumulators.items))
    for accumulator in accumulators.items:
        encoder.source(accumulator)
    numbers = [encoder.number(s) for s in signs]
    transposes = numbers[2:] or [0, 0]
    left: Reference = None
    registers: tuple[Reference, ...] = ()
    if isinstance(a, Vector):
        registers = tuple(encoder.source(item) for item in a.items)
        transposes = [0, *numbers[2:]] if len(numbers) == 3 else [0, 0]
    else:
        left = encoder.source(a, "b64")
    if any(transposes) and depth != 16:  # only 16-bit matrices may be M- or N-major
        raise encoder.refuse()
    flags = (
        ELEMENTS[kinds[1]]
        | ELEMENTS[kinds[2]] << 4
        | int(numbers[0] < 0) << 8
        | int(numbers[1] < 0) << 9
        | transposes[0] << 10
        | transposes[1] << 11
    )
    return encoder.build(
        "wgmma",
        a=left,
        b=encoder.source(b, "b64"),
        c=encoder.source(scale, "pred"),
        items=results + registers,
        extra=columns,
        imm=depth,
        width=len(registers),
        flags=flags,
        runs_late=True,
    )


def _group(encoder: Encoder) -> int:
    return 2 if "cta_group::2" in encoder.parts else 1


def _tcgen05(encoder: Encoder) -> Encoded:
    action = encoder.parts[1]
    lowering = _TENSOR.get(action)
    if lowering is None:
        raise encoder.refuse()
    return lowering(encoder)


def _tmem_alloc(encoder: Encoder) -> Encoded:
    base, offset, wide = encoder.address(encoder.operands[0])
    return encoder.build(
        "tmem_alloc",
        a=base,
        imm=offset,
        b=encoder.source(encoder.operands[1]),
        flags=wide | _space(encoder),
        extra=_group(encoder),
    )


def _tmem_dealloc(encoder: Encoder) -> Encoded:
    address, columns = map(encoder.source, encoder.operands)
    return encoder.build("tmem_dealloc", a=address, b=columns, extra=_group(encoder))


def _tmem_move(encoder: Encoder) -> Encoded:
    load = encoder.parts[1] == "ld"
    parts = encoder.parts[2:]
    reduces = "red" in parts
    shape = next((p for p in parts if p in SHAPES), None)
    repeat = next((int(p[1:]) for p in parts if re.fullmatch(r"x\d+", p)), 0)
    known = {"sync", "aligned", "b32", "f32", "red", "min", "max", "NaN", "abs", shape, f"x{repeat}"}
    if shape is None or not repeat or set(parts) - known or "abs" in parts or ("f32" in parts) != reduces:
        raise encoder.refuse()
    if load and not reduces:
        vector, where = encoder.operands
        extra: Operand | None = None
    elif load:
        vector, extra, where = encoder.operands
    else:
        (where, vector), extra = encoder.operands, None
    items = vector.items if isinstance(vector, Vector) else (vector,)
    if len(items) != repeat * _REGISTERS_PER_REPEAT[SHAPES[shape]]:
        raise encoder.refuse()
    base, offset, _ = encoder.address(where)
    references = tuple(map(encoder.destination if load else encoder.source, items))
    flags = SHAPES[shape] | int("max" in parts) << 4 | int("NaN" in parts) << 5 | int(reduces) << 6
    if not load:
        return encoder.build("tmem_store", a=base, imm=offset, items=references, flags=flags, extra=repeat)
    result = encoder.destination(extra) if extra is not None else None
    return encoder.build("tmem_load", d=result, a=base, imm=offset, items=references, flags=flags, extra=repeat)


def _tmem_mma(encoder: Encoder) -> Encoded:
    parts = [p for p in encoder.parts[2:] if not p.startswith("collector::")]
    kind = next((KINDS[p] for p in parts if p in KINDS), None)
    if kind is None or set(parts) - {"ws", "cta_group::1", "cta_group::2", *KINDS}:
        raise encoder.refuse()
    target, a, b, idesc, *rest = encoder.operands
    base, offset, _ = encoder.address(target)
    in_tmem = isinstance(a, Address)
    left_offset = 0
    if in_tmem:
        left, left_offset, _ = encoder.address(a)
    else:
        left = encoder.source(a, "b64")
    masks: tuple[Reference, ...] = ()
    if rest and isinstance(rest[0], Vector):
        masks = tuple(encoder.source(item) for item in rest[0].items)
        del rest[0]
    enable = encoder.source(rest.pop(0), "pred")
    if rest and not (isinstance(rest[0], Immediate) and rest[0].value == 0):
        raise encoder.refuse()
    items = (encoder.source(idesc), enable, Constant(left_offset & 0xFFFFFFFF), *masks)
    return encoder.build(
        "tmem_mma",
        a=base,
        imm=offset,
        b=left,
        c=encoder.source(b, "b64"),
        items=items,
        extra=_group(encoder),
        width=len(masks),
        flags=kind | int(in_tmem) << 4 | int("ws" in parts) << 5,
    )


def _tmem_copy(encoder: Encoder) -> Encoded:
    """Encode a copy from shared to tensor memory. Those that make bytes of smaller elements are refused."""
    group, *shape = encoder.parts[2:]
    if group not in ("cta_group::1", "cta_group::2") or tuple(shape) not in COPIES:
        raise encoder.refuse()
    base, offset, _ = encoder.address(encoder.operands[0])
    descriptor = encoder.source(encoder.operands[1], "b64")
    return encoder.build(
        "tmem_copy", a=base, imm=offset, b=descriptor, extra=_group(encoder), flags=COPIES[tuple(shape)] | FILLS
    )


def _tmem_commit(encoder: Encoder) -> Encoded:
    base, offset, wide = encoder.address(encoder.operands[0])
    flags = wide | _space(encoder, "shared::cluster")
    mask = None
    if "multicast::cluster" in encoder.parts:
        flags |= MULTICAST
        mask = encoder.source(encoder.operands[1], "b16")
    return encoder.build("tmem_commit", a=base, imm=offset, b=mask, flags=flags, extra=_group(encoder))


_TENSOR = {
    "alloc": _tmem_alloc,
    "dealloc": _tmem_dealloc,
    "relinquish_alloc_permit": lambda encoder: encoder.build("tmem_relinquish", extra=_group(encoder)),
    "ld": _tmem_move,
    "st": _tmem_move,
    "wait::ld": lambda encoder: encoder.build("tmem_wait_load"),
    "wait::st": lambda encoder: encoder.build("tmem_wait_store"),
    "fence::before_thread_sync": lambda encoder: encoder.build("tensor_fence", imm=0),
    "fence::after_thread_sync": lambda encoder: encoder.build("tensor_fence", imm=1),
    "mma": _tmem_mma,
    "cp": _tmem_copy,
    "commit": _tmem_commit,
}

LOWER_ASYNC = {
    "mbarrier": _mbarrier,
    "cp": _copy,
    "clusterlaunchcontrol": _cluster_launch,
    "wgmma": _wgmma,
    "tcgen05": _tcgen05,
}
