"""Controls, what is seen of them, and what is stated of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Judgement = Literal["defect", "kept"]


@dataclasses.dataclass(frozen=True)
class Package:
    """A distribution that controls come from, and the version that their findings are stated for.

    needs: what it imports beside CUTLASS, TVM-FFI and torch, as pip takes it.
    """

    name: str
    version: str
    needs: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Values:
    """How far results are from float64.

    out: norm of the difference over norm of the reference.
    lse: the greatest difference; None where a package does not return it.
    """

    out: float
    lse: float | None


@dataclasses.dataclass(frozen=True)
class Control:
    """One call of a package's public operator on a small random problem; it launches one or several kernels.

    call: makes the problem on the device "cuda", calls, and compares.
    limits: what `Values` must not exceed.
    processors: SMs of the emulated GPU, from which operators take how they split the work.
    lenient_tensor: the kernel runs with this option only.
    """

    name: str
    package: Package
    arch: str
    call: Callable[[], Values]
    limits: Values
    processors: int = 8
    lenient_tensor: bool = False

    @property
    def title(self) -> str:
        return f"{self.package.name} {self.arch} {self.name}"


@dataclasses.dataclass(frozen=True)
class Peer:
    """A package's kernel that the timing model knows.

    dims: of query and key, and of value.
    call: calls the operator for (sequences, queries, keys, heads) on the device "cuda", with inputs of its own making.
    rows: query rows of a cluster of its prefill.
    persistent: clusters take several row tiles, one after the other.
    section: bytes of keys and values whose heads a prefill runs together, the longest row tiles first, in powers of
        two; 0 where row tiles follow each other in the order of rows, heads, sequences.
    gathers: query tokens of a decode choose their keys, one by one.
    heads: the heads of a token that its kernel has, which callers with fewer fill up; 0: any number.
    """

    package: Package
    family: Literal["prefill", "decode"]
    arch: str
    dtype: Literal["bf16", "e4m3"]
    dims: tuple[int, int]
    call: Callable[[int, int, int, int], object]
    causal: bool = True
    rows: int = 0
    persistent: bool = False
    section: int = 0
    gathers: bool = False
    heads: int = 0

    @property
    def name(self) -> str:
        """The kernel's name, built like tsmla's symbols: package, family, architecture, dtype, dims and, for a prefill,
        the mask, for a decode, "_gathers" where keys are chosen and "_h64" where there is one number of heads."""
        mask = {"prefill": "_causal" if self.causal else "_full", "decode": "_gathers" * self.gathers}[self.family]
        heads = f"_h{self.heads}" if self.heads else ""
        return f"{self.package.name}_{self.family}_{self.arch}_{self.dtype}_d{self.dims[0]}x{self.dims[1]}{mask}{heads}"


@dataclasses.dataclass
class Seen:
    """What a control did.

    values: None when the call did not end.
    unwritten: elements of results that nobody wrote.
    failed: what ended the call, by name.
    refused: an error that is no finding: an instruction that the emulator does not know, or an exception of the
        package.
    differ: schedules whose results are other bytes than those of work that completes at issue.
    ended: by schedule, the finding that ended a run without the race check.
    lenient, strict: findings by name, and how many pairs of instructions each stands for.
    """

    kernels: int = 0
    values: Values | None = None
    unwritten: int = 0
    failed: str = ""
    refused: str = ""
    differ: list[str] = dataclasses.field(default_factory=list)
    ended: dict[str, str] = dataclasses.field(default_factory=dict)
    lenient: dict[str, int] = dataclasses.field(default_factory=dict)
    strict: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a finding is no mistake of the emulator's.

    - "defect": a defect by PTX, whatever the hardware makes of it. It must be reported leniently, too.
    - "kept": hardware keeps it although PTX does not promise it. It must be reported strictly, and must not be
      leniently.
    """

    judgement: Judgement
    text: str


@dataclasses.dataclass(frozen=True)
class Stated:
    """Stated findings by the title of their control, each with the name of its explanation; and the explanations."""

    explanations: Mapping[str, Explanation]
    findings: Mapping[str, Mapping[str, str]]

    @classmethod
    def read(cls, path: Path) -> Stated:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
        explanations = {name: Explanation(**given) for name, given in content["explanations"].items()}
        of_all = content["findings"]
        unknown = {why for of_one in of_all.values() for why in of_one.values()} - explanations.keys()
        if unknown:
            raise ValueError(f"{path}: no explanation {', '.join(sorted(unknown))}")
        return cls(explanations, of_all)

    def of(self, title: str, judgements: tuple[Judgement, ...]) -> dict[str, str]:
        """Return the findings of a control whose explanations are of these kinds, with the explanations' names."""
        found = self.findings.get(title, {})
        return {name: why for name, why in found.items() if self.explanations[why].judgement in judgements}


STATED = Path(__file__).with_name("stated.json")


def nothing(*_: Any) -> Any:
    """Stand in for what asks for a GPU, in torch or in a package: do nothing, also as a context."""
    return contextlib.nullcontext()
