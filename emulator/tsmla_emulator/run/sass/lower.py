"""Lowers machine code to the interpreter's operations: a second front end beside PTX, behind the same host code.

Registers R0 to R254, uniform registers and predicates have fixed slots of the register file; of a uniform one, all
lanes hold the same. Convergence barriers (BSSY, BSYNC) are state of the warp, at which its lanes wait for each other.
Asynchronous instructions become the operations that PTX has for them; what machine code alone has is in `lane_ops` and
core/sass_ops.cpp. Each instruction becomes one operation or a few, and what is found names its address.

An opcode, modifier or operand that is not known is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable

from .code import Code
from .lower_async import ASYNC
from .lower_floats import FLOATS
from .lower_flow import FLOW
from .lower_lanes import LANES
from .lower_memory import MEMORY
from .lower_numbers import NUMBERS
from .lower_predicates import PREDICATES
from .lower_tensor import TENSOR
from .model import Instruction

_LOWER: dict[str, Callable[[Code, Instruction], None]] = {
    **LANES, **PREDICATES, **FLOATS, **NUMBERS, **FLOW, **MEMORY, **ASYNC, **TENSOR,
}  # fmt: skip


def lower(code: Code, position: int, instruction: Instruction) -> None:
    """Add what one instruction does. Raises UnknownInstruction."""
    code.begin(position, instruction)
    lowering = _LOWER.get(instruction.opcode)
    if lowering is None:
        raise code.refuse()
    try:
        lowering(code, instruction)
    except ValueError as error:  # operands of another number
        raise code.refuse() from error
