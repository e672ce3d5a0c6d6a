"""What executed instructions cost: work by class from the interpreter's counts, and the time it takes at peak rates.

Work holds amounts of the names in CLASSES (warp instructions) and QUANTITIES; emulator/docs/cost-model.md has both.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from .machine import Count
from .ptx.encoding import COMPLEX_OPS, SPACES, Encoded
from .ptx.lower import lower
from .ptx.lower_async import ELEMENTS, KINDS
from .ptx.model import Entry, Instruction, Label
from .ptx.simple_ops import simple_count
from .rates import RATES, UnknownRate, blackwell_mma, hopper_mma

CLASSES = (
    "fp32", "fp32x2", "fp32 min/max", "special function", "convert", "integer", "compare, select", "branch", "move",
    "across lanes", "shared memory", "global memory", "tensor memory", "matrix", "bulk copy", "synchronise", "other",
)  # fmt: skip
QUANTITIES = (
    "polling", "MMAs", "tensor clk", "exponentials", "shared bytes", "shared bytes copied", "TMEM bytes",
    "global bytes read", "global bytes written", "mbarrier waits", "named barrier waits", "waits for own work",
)  # fmt: skip

_LANES = 32


class Work(dict[str, float]):
    """Amounts by name; a name that is not there has amount 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, other: Work, share: float = 1) -> None:
        """Add a share of other work to this."""
        for name, amount in other.items():
            self[name] += amount * share


@dataclass(frozen=True)
class Bound:
    """Clocks that one SM needs at least for a resource. `estimate` says why it may need fewer; "" when it cannot."""

    resource: str
    clocks: float
    estimate: str = ""


def bounds(arch: str, work: Work) -> list[Bound]:
    """The bound of each resource, for work that one SM does."""
    rates = RATES[arch]
    lanes = _LANES * (work["fp32"] + 2 * work["fp32x2"])
    issued = sum(work[name] for name in CLASSES) - work["move"]
    moved = work["global bytes read"] + work["global bytes written"]
    found = [
        Bound("tensor cores", work["tensor clk"]),
        Bound("exponentials", work["exponentials"] / rates.exponentials),
        Bound("shared memory", work["shared bytes"] / rates.shared_bytes),
        Bound(
            "shared memory, copies too",
            (work["shared bytes"] + work["shared bytes copied"]) / rates.shared_bytes,
            "if copies take turns with matrix operands",
        ),
        Bound("fp32", lanes / rates.fp32, "ptxas may fuse or drop instructions"),
        Bound("issue", issued / rates.issue, "PTX without moves, not what ptxas makes of it"),
        Bound("HBM", moved / rates.per_clock(rates.hbm), "as if no byte came from a cache"),
    ]
    if rates.l2:
        found.insert(-1, Bound("L2", moved / rates.per_clock(rates.l2), "rate commonly measured, not verified"))
    return found


def tightest(found: list[Bound]) -> Bound:
    """The largest bound that holds for certain, or the largest estimate where no such resource is used."""
    certain = [bound for bound in found if bound.clocks and not bound.estimate]
    return max(certain or found, key=lambda bound: bound.clocks)


def work_of(entry: Entry, counts: dict[int, Count]) -> Work:
    """What a warp's executions of an entry's instructions, by their index, amount to; polling apart from the classes.

    Raises UnknownRate for matrix instructions without a rate.
    """
    work = Work()
    polled: Counter[int] = Counter()
    for index, count in counts.items():
        if count.failed:
            for position in polling_loop(entry, index):
                polled[position] += count.failed
    for index, count in counts.items():
        instruction = entry.instructions[index]
        work[class_of(instruction.opcode)] += count.executed - polled[index]
        work["polling"] += polled[index]
        _add_quantities(work, entry, instruction, count)
    return work


def polling_loop(entry: Entry, index: int) -> tuple[int, ...]:
    """Instructions that run once more when the mbarrier try at `index` fails: those of the shortest way back to it.

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
}  # fmt: skip
_ASYNC = {
    "wgmma.mma_async": "matrix", "tcgen05.mma": "matrix", "tcgen05.ld": "tensor memory", "tcgen05.st": "tensor memory",
}  # fmt: skip
_ARITHMETIC = (
    "add sub mul mad fma div rem neg abs min max and or xor not shl shr shf popc clz brev bfind bfe bfi prmt lop3 "
    "copysign mul24"
).split()


def class_of(opcode: str) -> str:
    """The one of CLASSES that an opcode belongs to."""
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


def _add_quantities(work: Work, entry: Entry, instruction: Instruction, count: Count) -> None:
    kind = class_of(instruction.opcode)
    if kind == "special function" and instruction.opcode.startswith("ex2"):
        work["exponentials"] += count.lanes
    elif kind == "synchronise":
        _add_waits(work, instruction, count)
    elif kind in ("shared memory", "global memory", "tensor memory", "matrix", "bulk copy"):
        encoded = lower(entry, instruction)
        add = _BY_NAME.get(COMPLEX_OPS[encoded.op - simple_count()])
        if add is not None:  # None: a prefetch, which the interpreter skips
            add(work, encoded, instruction, count)


def _add_waits(work: Work, instruction: Instruction, count: Count) -> None:
    first, second, *rest = [*instruction.opcode.split("."), "", ""]
    if second in ("try_wait", "test_wait"):
        work["mbarrier waits"] += count.executed - count.failed
    elif first in ("bar", "barrier") and ("sync" in (second, *rest) and second != "warp" or "wait" in rest):
        work["named barrier waits"] += count.executed
    elif any(part.startswith(("wait_group", "wait_all", "wait::")) for part in (second, *rest)):
        work["waits for own work"] += count.executed


def _access(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    moved = count.lanes * encoded.width * max(1, len(encoded.items))
    if encoded.flags & 7 != SPACES["global"]:
        work["shared bytes"] += moved
        return
    first = instruction.opcode.split(".")[0]
    work["global bytes read"] += moved if first in ("ld", "atom", "red") else 0
    work["global bytes written"] += moved if first != "ld" else 0


def _matrix_move(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    work["shared bytes"] += count.executed * len(encoded.items) * 128


def _copy(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    work["global bytes read"] += count.lanes * encoded.extra
    work["shared bytes copied"] += count.lanes * encoded.extra


def _bulk(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    spaces = [part for part in instruction.opcode.split(".") if part in SPACES]
    for (size, targets), times in count.sizes.items():
        for space, sides, direction in zip(spaces, (targets, 1), ("written", "read"), strict=True):
            work[f"global bytes {direction}" if space == "global" else "shared bytes copied"] += times * size * sides


def _tensor_move(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    work["TMEM bytes"] += count.executed * len(encoded.items) * _LANES * 4


def _wgmma(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    if {encoded.flags & 15, encoded.flags >> 4 & 15} - {ELEMENTS[n] for n in ("f16", "bf16", "e4m3", "e5m2")}:
        raise UnknownRate(f"no rate is known for {instruction.opcode} at line {instruction.line}")
    times = count.executed / 4  # four warps issue it together
    rows = 0 if encoded.a is None else 64
    work["MMAs"] += times
    work["tensor clk"] += times * hopper_mma(encoded.extra)
    work["shared bytes"] += times * 32 * (rows + encoded.extra)


def _tcgen05_mma(work: Work, encoded: Encoded, instruction: Instruction, count: Count) -> None:
    if encoded.flags & 15 not in (KINDS["kind::f16"], KINDS["kind::f8f6f4"]):
        raise UnknownRate(f"no rate is known for {instruction.opcode} at line {instruction.line}")
    a_shared = not encoded.flags >> 4 & 1
    for (descriptor, ctas), times in count.sizes.items():
        rows, columns = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
        clocks = blackwell_mma(rows, columns, ctas == 2, a_shared, bool(encoded.flags >> 5 & 1))
        work["MMAs"] += times
        work["tensor clk"] += times * ctas * clocks
        work["shared bytes"] += times * 32 * (columns + (rows if a_shared else 0))


_BY_NAME = {
    "load": _access, "store": _access, "atomic": _access, "ldmatrix": _matrix_move, "stmatrix": _matrix_move,
    "cp_async": _copy, "bulk_copy": _bulk, "bulk_load_tensor": _bulk, "bulk_store_tensor": _bulk,
    "tmem_load": _tensor_move, "tmem_store": _tensor_move, "wgmma": _wgmma, "tmem_mma": _tcgen05_mma,
}  # fmt: skip
