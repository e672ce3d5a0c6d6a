"""Classes of opcodes by the work that they do, and the loops that only poll an mbarrier."""

from __future__ import annotations

from collections import deque

from ..run.ptx.model import Entry, Label

CLASSES = (
    "fp32", "fp32x2", "fp32 min/max", "special function", "convert", "integer", "compare, select", "branch", "move",
    "across lanes", "shared memory", "global memory", "tensor memory", "matrix", "bulk copy", "synchronise", "other",
)  # fmt: skip


def polling_loop(entry: Entry, index: int) -> tuple[int, ...]:
    """Return the instructions that run once more when the mbarrier try at `index` fails: those of the shortest way back
    to it.

    Empty when there is no way that does nothing else, as with a try that only looks ahead.
    """
    ways: deque[tuple[int, ...]] = deque([(index,)])
    seen = {index}
    while ways:
        way = ways.popleft()
        for after in _after(entry, way[-1]):
            if after == index:
                return way
            if after not in seen and len(way) < 16 and _harmless(entry, after):
                seen.add(after)
                ways.append((*way, after))
    return ()


def _after(entry: Entry, index: int) -> list[int]:
    instruction = entry.instructions[index]
    following = [index + 1]
    if instruction.opcode.startswith("bra"):
        (target,) = instruction.operands
        assert isinstance(target, Label)
        following = [entry.labels[target.name]] if instruction.guard is None else [index + 1, entry.labels[target.name]]
    return [position for position in following if position < len(entry.instructions)]


def _harmless(entry: Entry, index: int) -> bool:
    name = entry.instructions[index].opcode.split(".")[0]
    return name in ("bra", "mov", "setp", "selp", "not", "and", "or", "xor", "add", "sub", "nanosleep")


_FIRST = {
    "cvt": "convert", "setp": "compare, select", "selp": "compare, select", "bra": "branch", "ret": "branch",
    "exit": "branch", "mov": "move", "cvta": "move", "prefetch": "move", "createpolicy": "move", "shfl": "across lanes",
    "vote": "across lanes", "elect": "across lanes", "redux": "across lanes", "activemask": "across lanes",
    "mma": "matrix", "ldmatrix": "shared memory", "stmatrix": "shared memory", "mbarrier": "synchronise",
    "bar": "synchronise", "barrier": "synchronise", "fence": "synchronise", "membar": "synchronise",
    "griddepcontrol": "synchronise", "setmaxnreg": "synchronise", "nanosleep": "synchronise",
    "ex2": "special function", "lg2": "special function", "rcp": "special function", "sqrt": "special function",
    "rsqrt": "special function", "tanh": "special function", "mapa": "integer", "getctarank": "integer",
    "clusterlaunchcontrol": "integer",
}  # fmt: skip
_ASYNC = {
    "wgmma.mma_async": "matrix",
    "tcgen05.mma": "matrix",
    "tcgen05.ld": "tensor memory",
    "tcgen05.st": "tensor memory",
}
_ARITHMETIC = (
    "add sub mul mad fma div rem neg abs min max and or xor not shl shr shf popc clz brev bfind bfe bfi prmt lop3 "
    "copysign mul24"
).split()


def class_of(opcode: str) -> str:
    """Return the one of CLASSES that an opcode belongs to."""
    first, second, *rest = [*opcode.split("."), ""]
    if first in _FIRST:
        return _FIRST[first]
    if first in ("wgmma", "tcgen05"):
        return _ASYNC.get(f"{first}.{second}", "synchronise")
    if first == "cp":
        if any(part in ("commit_group", "wait_group", "wait_all", "mbarrier") for part in rest):
            return "synchronise"
        return "bulk copy" if "bulk" in rest else "shared memory"
    if first in ("ld", "st", "atom", "red"):
        parts = opcode.split(".")
        if "param" in parts:
            return "move"
        return "global memory" if "global" in parts else "shared memory" if _is_shared(parts) else "other"
    if first in _ARITHMETIC:
        if opcode.endswith(".pred"):
            return "compare, select"
        if opcode.endswith("f32x2"):
            return "fp32x2"
        if opcode.endswith("f32"):
            return "fp32 min/max" if first in ("min", "max") else "fp32"
        return "integer"
    return "other"


def _is_shared(parts: list[str]) -> bool:
    return any(part.split("::")[0] == "shared" for part in parts)
