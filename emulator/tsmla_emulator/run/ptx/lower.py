"""Encodes instructions: lane-wise ones from the table, control, memory and warp instructions here."""

from __future__ import annotations

from .encoding import PARAM_SLOT, SIGNED, SPACES, Constant, Encoded, Encoder, Slot, register_width
from .lower_async import LOWER_ASYNC
from .model import Entry, Instruction, Label, Pair, Register, Symbol, Vector
from .parser import type_bytes
from .simple_ops import SIMPLE_OPS, number_of

SPECIAL_REGISTERS = (
    "%tid.x %tid.y %tid.z %ntid.x %ntid.y %ntid.z %ctaid.x %ctaid.y %ctaid.z %nctaid.x %nctaid.y %nctaid.z "
    "%laneid %warpid %nwarpid %cluster_ctarank %cluster_nctarank %cluster_ctaid.x %cluster_ctaid.y %cluster_ctaid.z "
    "%cluster_nctaid.x %cluster_nctaid.y %cluster_nctaid.z %clusterid.x %clusterid.y %clusterid.z "
    "%nclusterid.x %nclusterid.y %nclusterid.z %smid %clock %clock64 %globaltimer %lanemask_eq %lanemask_lt "
    "%lanemask_le %lanemask_gt %lanemask_ge %dynamic_smem_size %total_smem_size"
).split()

_SILENT = (
    "prefetch.",
    "prefetchu.",
    "nanosleep.",
    "cp.async.bulk.prefetch",
    "fence.proxy.tensormap",
    "discard.",
    "applypriority.",
)
_QUALIFIERS = {
    "weak", "relaxed", "acquire", "release", "volatile", "cta", "cluster", "gpu", "sys", "nc", "unified", "noftz",
}  # fmt: skip
_SHUFFLES = {"idx": 0, "up": 1, "down": 2, "bfly": 3}
_VOTES = {"all": 0, "any": 1, "uni": 2, "ballot": 3}
_ATOMICS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}


def lower(entry: Entry, instruction: Instruction) -> Encoded:
    """Encode one instruction. Raises NotImplementedInstruction for anything unknown."""
    encoder = Encoder(entry, instruction)
    opcode = instruction.opcode
    first = encoder.parts[0]
    if first == "mov" and (moved := _move(encoder)) is not None:
        return moved
    if first in ("max", "min") and len(instruction.operands) == 4:
        opcode = opcode.replace(first, first + "3", 1)
    if opcode in SIMPLE_OPS:
        return _simple(encoder, opcode)
    if opcode.startswith(_SILENT):
        return encoder.build("nop")
    lowering = _LOWER.get(first) or LOWER_ASYNC.get(first)
    if lowering is None:
        raise encoder.refuse()
    return lowering(encoder)


def _simple(encoder: Encoder, opcode: str) -> Encoded:
    shape = SIMPLE_OPS[opcode]
    if len(encoder.operands) != 1 + len(shape.sources):
        raise encoder.refuse()
    sources = [encoder.source(operand, kind) for operand, kind in zip(encoder.operands[1:], shape.sources, strict=True)]
    names = dict(zip("abce", sources, strict=False))
    return encoder.build(number_of(opcode), d=encoder.destination(encoder.operands[0]), **names)


def _move(encoder: Encoder) -> Encoded | None:
    target, value = encoder.operands
    kind = encoder.parts[-1]
    if isinstance(value, Symbol):
        if value.name in SPECIAL_REGISTERS:
            return encoder.build(
                "special",
                d=encoder.destination(target),
                imm=SPECIAL_REGISTERS.index(value.name),
                width=type_bytes(kind),
            )
        base, offset = encoder.symbol(value)
        wide = kind.endswith("64")
        return encoder.build(
            number_of("add.s64" if wide else "add.s32"),
            d=encoder.destination(target),
            a=base,
            b=Constant(offset, 2 if wide else 1),
        )
    if isinstance(value, Vector):
        element = type_bytes(kind) // len(value.items)
        items = tuple(encoder.source(item, f"b{8 * element}") for item in value.items)
        return encoder.build("pack", d=encoder.destination(target), items=items, width=element)
    if isinstance(target, Vector):
        element = type_bytes(kind) // len(target.items)
        source = encoder.source(value, kind)
        return encoder.build("unpack", a=source, items=tuple(map(encoder.destination, target.items)), width=element)
    return None


def _branch(encoder: Encoder) -> Encoded:
    target = encoder.operands[0]
    if not isinstance(target, Label):
        raise encoder.refuse()
    return encoder.build("bra", target=target.name)


def _memory(encoder: Encoder) -> Encoded:
    load = encoder.parts[0] == "ld"
    space, count, kind = "generic", 1, ""
    for part in encoder.parts[1:]:
        if part in SPACES:
            space = part
        elif part in ("v2", "v4", "v8"):
            count = int(part[1:])
        elif part[0] in "busf" and part[1:].isdigit():
            kind = part
        elif part not in _QUALIFIERS and not part.startswith(("L1::", "L2::")):
            raise encoder.refuse()
    value, where = encoder.operands[:2] if load else (encoder.operands[1], encoder.operands[0])
    base, offset, flags = encoder.address(where)
    flags |= SPACES[space] | (SIGNED if kind[0] == "s" else 0) | _ordering(encoder)
    if isinstance(base, Slot) and base.index == PARAM_SLOT:
        flags = flags & ~7 | SPACES["param"]
    values = value.items if isinstance(value, Vector) else (value,)
    if len(values) != count:
        raise encoder.refuse()
    width = type_bytes(kind)
    if load:
        items = tuple(map(encoder.destination, values))
    else:
        items = tuple(encoder.source(item, kind) for item in values)
    widths = {register_width(item) * 4 for item in values if isinstance(item, Register)}
    if len(widths) > 1 or any(w < min(width, 16) for w in widths):
        raise encoder.refuse()
    name = "load" if load else "store"
    return encoder.build(name, a=base, imm=offset, flags=flags, width=width, items=items, extra=max(widths, default=4))


def _ordering(encoder: Encoder) -> int:
    """Return flags that say what an access of global memory orders: kStrong, kAcquire, kRelease of core/ops.h."""
    parts = set(encoder.parts)
    strong = encoder.parts[0] in ("atom", "red") or parts & {"relaxed", "acquire", "release", "acq_rel", "volatile"}
    acquires, releases = parts & {"acquire", "acq_rel"}, parts & {"release", "acq_rel"}
    return (1 << 20 if strong else 0) | (1 << 21 if acquires else 0) | (1 << 22 if releases else 0)


def _atomic(encoder: Encoder) -> Encoded:
    parts = [p for p in encoder.parts[1:] if p not in _QUALIFIERS and not p.startswith(("L1::", "L2::"))]
    space = parts.pop(0) if parts and parts[0] in SPACES else "generic"
    if len(parts) != 2 or parts[0] not in _ATOMICS or parts[1] not in ("b32", "u32", "s32", "f32", "b64", "u64"):
        raise encoder.refuse()
    if parts[1] == "f32" and parts[0] != "add":
        raise encoder.refuse()
    returns = encoder.parts[0] == "atom"
    operands = list(encoder.operands)
    result = encoder.destination(operands.pop(0)) if returns else None
    base, offset, flags = encoder.address(operands.pop(0))
    values = [encoder.source(o, parts[1]) for o in operands]
    flags |= SPACES[space] | (SIGNED if parts[1] == "s32" else 0) | (1 << 10 if parts[1] == "f32" else 0)
    flags |= _ordering(encoder)
    names = dict(zip("bc", values, strict=False))
    width = type_bytes(parts[1])
    return encoder.build(
        "atomic", d=result, a=base, imm=offset, flags=flags, width=width, extra=_ATOMICS[parts[0]], **names
    )


def _barrier(encoder: Encoder) -> Encoded:
    parts = [p for p in encoder.parts[1:] if p != "cta"]
    if parts[0] == "warp":
        return encoder.build("warp_sync", a=encoder.source(encoder.operands[0]))
    if parts[0] == "cluster":
        arrive = parts[1] == "arrive"
        return encoder.build("cluster_arrive" if arrive else "cluster_wait", flags=int("relaxed" in parts))
    if parts[0] not in ("sync", "arrive"):
        raise encoder.refuse()
    sources = [encoder.source(operand) for operand in encoder.operands]
    return encoder.build(f"barrier_{parts[0]}", **dict(zip("ab", sources, strict=False)))


def _fence(encoder: Encoder) -> Encoded:
    if encoder.instruction.opcode.startswith(("fence.acq_rel", "fence.sc", "membar.")):
        return encoder.build("memory_fence")
    if encoder.instruction.opcode.startswith("fence.proxy.async"):
        spaces = [part.partition("::")[0] for part in encoder.parts]
        return encoder.build("proxy_fence", imm=1 if "global" in spaces else 2 if "shared" in spaces else 0)
    if encoder.instruction.opcode.startswith("fence.mbarrier_init"):
        return encoder.build("mbarrier_fence")
    raise encoder.refuse()


def _shuffle(encoder: Encoder) -> Encoded:
    target, *rest = encoder.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    if encoder.parts[1] != "sync" or encoder.parts[-1] != "b32" or len(rest) != 4:
        raise encoder.refuse()
    a, b, c, e = map(encoder.source, rest)
    items = (encoder.destination(second),) if second is not None else ()
    return encoder.build(
        "shuffle", d=encoder.destination(first), a=a, b=b, c=c, e=e, items=items, imm=_SHUFFLES[encoder.parts[2]]
    )


def _vote(encoder: Encoder) -> Encoded:
    if encoder.parts[1] != "sync" or encoder.parts[2] not in _VOTES:
        raise encoder.refuse()
    target, predicate, mask = encoder.operands
    return encoder.build(
        "vote",
        d=encoder.destination(target),
        a=encoder.source(predicate, "pred"),
        b=encoder.source(mask),
        imm=_VOTES[encoder.parts[2]],
    )


def _elect(encoder: Encoder) -> Encoded:
    target, mask = encoder.operands
    if not isinstance(target, Pair):
        raise encoder.refuse()
    leader = encoder.destination(target.first)
    return encoder.build("elect", d=leader, items=(encoder.destination(target.second),), a=encoder.source(mask))


def _reduce(encoder: Encoder) -> Encoded:
    if encoder.parts[1] != "sync" or encoder.parts[3] == "f32":
        raise encoder.refuse()
    target, value, mask = encoder.operands
    return encoder.build(
        "reduce",
        d=encoder.destination(target),
        a=encoder.source(value),
        b=encoder.source(mask),
        imm=_ATOMICS[encoder.parts[2]],
        flags=SIGNED if encoder.parts[3] == "s32" else 0,
    )


def _identity(encoder: Encoder) -> Encoded:
    target, value = encoder.operands
    if isinstance(value, Symbol):
        base, offset = encoder.symbol(value)
        return encoder.build(number_of("add.s64"), d=encoder.destination(target), a=base, b=Constant(offset, 2))
    wide = encoder.parts[-1].endswith("64")
    return encoder.build(
        number_of("mov.b64" if wide else "mov.b32"),
        d=encoder.destination(target),
        a=encoder.source(value, encoder.parts[-1]),
    )


def _map_rank(encoder: Encoder) -> Encoded:
    target, address, rank = encoder.operands
    return encoder.build(
        "map_rank",
        d=encoder.destination(target),
        a=encoder.source(address, encoder.parts[-1]),
        b=encoder.source(rank),
        width=type_bytes(encoder.parts[-1]),
    )


def _rank_of(encoder: Encoder) -> Encoded:
    target, address = encoder.operands
    return encoder.build("rank_of", d=encoder.destination(target), a=encoder.source(address))


def _matrix(encoder: Encoder) -> Encoded:
    load = encoder.parts[0] == "ldmatrix"
    if encoder.parts[3] != "m8n8" or encoder.parts[-1] != "b16":
        raise encoder.refuse()
    vector, where = encoder.operands if load else encoder.operands[::-1]
    base, offset, flags = encoder.address(where)
    items = vector.items if isinstance(vector, Vector) else (vector,)
    references = tuple(map(encoder.destination if load else encoder.source, items))
    if len(references) != int(encoder.parts[4][1:]):
        raise encoder.refuse()
    return encoder.build(
        encoder.parts[0],
        a=base,
        imm=offset,
        flags=flags | SPACES["shared"],
        items=references,
        extra=int("trans" in encoder.parts),
    )


def _warp_product(encoder: Encoder) -> Encoded:
    kinds = {"f16": 0, "bf16": 1}
    kind = encoder.parts[-2]
    expected = ["mma", "sync", "aligned", "m16n8k16", "row", "col", "f32", kind, kind, "f32"]
    vectors = [operand.items if isinstance(operand, Vector) else () for operand in encoder.operands]
    if encoder.parts != expected or kind not in kinds or [len(items) for items in vectors] != [4, 4, 2, 4]:
        raise encoder.refuse()
    sums, *sources = vectors
    read = tuple(encoder.source(item) for items in sources for item in items)
    return encoder.build("mma", items=(*map(encoder.destination, sums), *read), imm=kinds[kind])


def _set_registers(encoder: Encoder) -> Encoded:
    return encoder.build("set_registers", imm=encoder.number(encoder.operands[0]), flags=int(encoder.parts[1] == "inc"))


def _grid(encoder: Encoder) -> Encoded:
    return encoder.build({"wait": "grid_wait", "launch_dependents": "grid_launch"}[encoder.parts[1]])


def _policy(encoder: Encoder) -> Encoded:
    return encoder.build(number_of("mov.b64"), d=encoder.destination(encoder.operands[0]), a=Constant(0, 2))


def _active_mask(encoder: Encoder) -> Encoded:
    return encoder.build("active_mask", d=encoder.destination(encoder.operands[0]))


_LOWER = {
    "bra": _branch,
    "ret": lambda encoder: encoder.build("exit"),
    "exit": lambda encoder: encoder.build("exit"),
    "trap": lambda encoder: encoder.build("trap"),
    "ld": _memory,
    "st": _memory,
    "atom": _atomic,
    "red": _atomic,
    "bar": _barrier,
    "barrier": _barrier,
    "fence": _fence,
    "membar": _fence,
    "shfl": _shuffle,
    "vote": _vote,
    "elect": _elect,
    "redux": _reduce,
    "cvta": _identity,
    "mapa": _map_rank,
    "getctarank": _rank_of,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
    "mma": _warp_product,
    "setmaxnreg": _set_registers,
    "griddepcontrol": _grid,
    "createpolicy": _policy,
    "activemask": _active_mask,
}
