"""Emulates the kernels that operators, exported functions or bare PTX entries launch.

>>> with emulated("sm_90a", Options(async_mode="late", seed=3)) as gpu:
...     q = torch.randn(128, 4, 192, dtype=torch.bfloat16, device="cuda")
...     out, lse = tsmla.tsmla_prefill(q, k, v, ...)
>>> gpu.calls[-1].report
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from tsmla.identity.arch import Arch
from tsmla.identity.call import OPERATORS

from . import kept, machine, record
from .host import adoption, doubles, launch_config
from .host.capture import Gpu, extents, open_library
from .host.launch_config import KernelLimits
from .host.link import link
from .host.memory import Extent, check_guards, merged
from .host.tensor import EmulatedDevice, EmulatedTensor, plain, spread, unwritten
from .host.tensor_map import TensorMap
from .machine import EmulationError, Launch, Module, Options, Region, Report
from .ptx.model import Entry
from .sass.program import machine_code_module

if TYPE_CHECKING:
    from .host.compile import Compiled

Rewrite = Callable[[Module], Module]

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
"""Names of a PTX text's kernels."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that was emulated.

    unwritten: per output, how many elements still hold poison.
    library: the file that the function is from, None for bare PTX.
    memory: a digest of each region that the kernels could write to, as they left it.
    """

    name: str
    launches: tuple[Launch, ...]
    report: Report
    unwritten: dict[str, int]
    module: Module
    library: Path | None = None
    memory: dict[str, str] = dataclasses.field(default_factory=dict)


class Emulation:
    """An emulated GPU: what `emulated` yields. `calls` grows by one with each call that launched something."""

    def __init__(
        self,
        arch: str,
        options: Options,
        rewrite: Rewrite | None,
        record_to: Path | None,
        compiled: Callable[[Any], Compiled] | None,
        spreads: bool = False,
    ):
        if arch not in [*Arch]:
            raise ValueError(f"arch is {arch!r}; emulated: {', '.join(Arch)}")
        self.arch = arch
        self.gpu = Gpu(Arch(arch).capability, Arch(arch).sms)
        self.options = options
        self.calls: list[Call] = []
        self._rewrite = rewrite
        self._record_to = record_to
        self._compiled = compiled
        self.spreads = spreads

    def load(
        self, exported: Path | str, ptx: Path | str, symbol: str, writes: Callable[[str], bool] = lambda name: True
    ) -> Kernel:
        """Load a function that `export_to_c` wrote (.o or .ll) and the PTX of the same compile, as a callable.

        writes: which parameters the kernels may write to, by name; by default all. Raises LinkError, AttributeError
        when the object has no such function, and PtxError.
        """
        return Kernel(self, link(Path(exported)), Path(ptx).read_text("utf-8"), symbol, writes)

    def adopt(self, compiled: Any, writes: Callable[[str], bool] = lambda name: True) -> Kernel:
        """Make a callable of what `cute.compile(..., options="--enable-tvm-ffi --keep-ptx --gpu-arch ...")` returned.

        Raises ValueError when it was compiled without one of the first two options.
        """
        library, ptx = adoption.export(compiled)
        return Kernel(self, library, ptx, adoption.SYMBOL, writes)

    def launch(
        self,
        ptx: str,
        entry: str,
        grid: Sequence[int],
        block: Sequence[int],
        params: Sequence[Any],
        *,
        cluster: Sequence[int] = (1, 1, 1),
        shared_bytes: int = 0,
        pdl: bool = False,
        touches: Sequence[torch.Tensor] = (),
    ) -> Call:
        """Run one entry of a PTX text without host code.

        params: one value per PTX parameter: an emulated tensor (its address), an int or float (as wide as the
            parameter), a `TensorMap`, or bytes.
        grid, block, cluster: up to three sizes.
        touches: tensors that the kernel reaches otherwise, through tensor maps or addresses inside bytes.
        """
        module = self._module(ptx)
        if entry not in module.entries:
            raise EmulationError(f"the PTX has no entry {entry}; it has: {', '.join(module.entries)}", kind="launch")
        found = module.entries[entry]
        launch = Launch(
            entry, _three(grid), _three(block), _three(cluster), shared_bytes, pack_params(found, params), pdl
        )
        launch_config.check(launch, found, KernelLimits(self.gpu.shared_per_cta, True), self.gpu.processors)
        names = [param.name.removeprefix(f"{entry}_") for param in found.params]
        reached = (*params, *touches)
        return self.run(entry, module, [launch], reached, extents(reached, names, lambda name: True))

    def run(
        self,
        name: str,
        module: Module,
        launches: list[Launch],
        arguments: Sequence[Any],
        touched: list[Extent],
        library: Path | None = None,
    ) -> Call:
        """Run launches in order over the memory that they may touch, and check what they left behind.

        Raises EmulationError, and GuardError when memory outside of every allocation changed.
        """
        regions = [Region(e.start, e.end - e.start, e.name, e.writable) for e in merged(touched)]
        if self._record_to:
            path = self._record_to / f"{len(self.calls):03d}-{name}.npz"
            record.save(path, launches, regions)
            path.with_suffix(".ptx").write_text(module.text, "utf-8")
        report = machine.run_launches(module, launches, regions, self.options)
        check_guards()
        outputs = {e.start: e.name for e in touched if e.writable}
        left = {
            outputs[start]: count
            for argument in arguments
            if isinstance(argument, EmulatedTensor)
            and (start := argument.data_ptr()) in outputs
            and (count := unwritten(argument))
        }
        memory = {
            region.name: hashlib.sha1(ctypes.string_at(region.address, region.size)).hexdigest()
            for region in regions
            if region.writable
        }
        call = Call(name, tuple(launches), report, left, module, library, memory)
        self.calls.append(call)
        return call

    def kernel(self, variant: Any) -> Kernel:
        """Return the kernel of a tsmla variant for this architecture, compiled if it was not before."""
        from .host.compile import compile_for_emulation

        if str(variant.arch) != self.arch:
            raise ValueError(f"{variant.symbol()} is for {variant.arch}; the emulated GPU is {self.arch}")
        made = (self._compiled or compile_for_emulation)(variant)
        written = {x.name for x in OPERATORS[variant.family].tensors if x.written or x.scratch}
        text = made.ptx.read_text("utf-8")
        return Kernel(self, made.library, text, made.symbol, written.__contains__, made.machine_code)

    def module(self, text: str, library: Path) -> Module:
        """Return what the kernels of a PTX text run: the text, or their machine code in a library if the options say
        so."""
        if not self.options.machine_code:
            return self._module(text)
        if self._rewrite:
            raise ValueError("rewrite changes PTX; machine code is run as the library has it")
        return machine_code_module(library, frozenset(_ENTRY.findall(text)), text)

    def _module(self, text: str) -> Module:
        if self.options.machine_code:
            raise ValueError("PTX alone has no machine code")
        module = _parsed(text)
        return self._rewrite(module) if self._rewrite else module


class Kernel:
    """A TVM-FFI function whose launches are emulated. Call it as the function itself, with emulated tensors."""

    def __init__(
        self,
        emulation: Emulation,
        library: Path,
        ptx: str,
        symbol: str,
        writes: Callable[[str], bool],
        machine_code: Path | None = None,
    ) -> None:
        self.symbol = symbol
        self._emulation = emulation
        self._library = open_library(library)
        self.parameters = self._library.parameters(symbol)
        self._module = emulation.module(ptx, machine_code or library)
        self._writes = writes

    def __call__(self, *positional: Any, **named: Any) -> None:
        """Call the function with arguments by position or name; those that can only be None may be left out.

        Raises what the function's own argument checks raise, and what `Emulation.run` does.
        """
        given = self._bound(positional, named)
        arguments = self._spread(given) if self._emulation.spreads else given
        touched = extents(arguments, [*self.parameters], self._writes)
        launches = self._library.record(self.symbol, arguments, self._module, self._emulation.gpu)
        if launches:
            self._emulation.run(self.symbol, self._module, launches, arguments, touched, self._library.path)
        for name, argument, used in zip(self.parameters, given, arguments, strict=True):
            if used is not argument and self._writes(name):
                plain(argument).copy_(plain(used))

    def _spread(self, given: Sequence[Any]) -> list[Any]:
        """Spread tensors among arguments, but those that the function does not take so."""
        arguments = [*given]
        for place, argument in enumerate(given):
            for other in spread(argument) if isinstance(argument, EmulatedTensor) and argument.dim() > 1 else ():
                arguments[place] = other
                with contextlib.suppress(ValueError, TypeError, RuntimeError):
                    self._library.record(self.symbol, arguments, self._module, self._emulation.gpu)
                    break
                arguments[place] = argument
        return arguments

    def _bound(self, positional: tuple[Any, ...], named: dict[str, Any]) -> list[Any]:
        """Return arguments by position: exported functions take no others, and have lost their defaults."""
        rest = [*self.parameters.items()][len(positional) :]
        values = dict(named)
        bound = [values.pop(name, None) for name, kind in rest if name in values or kind == "None"]
        if values:
            raise TypeError(f"{self.symbol} takes no {', '.join(values)}, or got it twice")
        return [*positional, *bound]


@contextlib.contextmanager
def emulated(
    arch: str,
    options: Options = Options(),  # noqa: B008 -- frozen
    *,
    rewrite: Rewrite | None = None,
    record_to: Path | None = None,
    adopt_compiles: bool = False,
    compiled: Callable[[Any], Compiled] | None = None,
    processors: int | None = None,
    spreads: bool = False,
) -> Iterator[Emulation]:
    """Give torch, inside this context, a CUDA device 0 of this architecture, on which tsmla's operators run emulated.

    rewrite: changes each parsed module before it runs, to try what a kernel without some instruction does.
    record_to: an existing directory in which each call leaves its PTX and launch record, for `tsmla-emulator run`.
    adopt_compiles: every `cute.compile` inside gives an emulated kernel for this architecture, so that a package which
        compiles its kernels when they are first called runs unchanged; have it compile nothing before.
    compiled: gives the files of a tsmla variant; by default they are compiled, with line information.
    processors: how many SMs torch finds; by default as many as the architecture's GPUs have.
    spreads: kernels get copies of tensors whose rows lie more than 2**32 elements apart, where they take such.

    Not for several threads at once: it replaces functions of torch.cuda and tsmla for the time being. Emulated tensors
    outlive it, but device="cuda" means what it did before.
    """
    emulation = Emulation(arch, options, rewrite, record_to, compiled, spreads)
    processors = processors or emulation.gpu.processors
    replaced = doubles.torch_cuda(arch, emulation.gpu, processors) + doubles.tsmla_search(arch, emulation.kernel)
    replaced += doubles.references()
    with contextlib.ExitStack() as stack:
        for target, name, replacement in replaced:
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(doubles.fresh_resolution())
        if adopt_compiles:
            stack.enter_context(adoption.adopting(arch, processors, emulation.adopt))
        stack.enter_context(EmulatedDevice())
        yield emulation


def pack_params(entry: Entry, values: Sequence[Any]) -> bytes:
    """Return a parameter block from one value per parameter. Raises EmulationError when number or size does not fit."""
    if len(values) != len(entry.params):
        raise EmulationError(f"{entry.name} takes {len(entry.params)} parameters, {len(values)} given", kind="launch")
    block = bytearray(entry.param_bytes)
    for param, value in zip(entry.params, values, strict=True):
        content = _param_bytes(value, param.size)
        if len(content) != param.size:
            raise EmulationError(
                f"{entry.name}: parameter {param.name} has {param.size} bytes, {value!r} has {len(content)}",
                kind="launch",
            )
        block[param.offset : param.offset + param.size] = content
    return bytes(block)


def _param_bytes(value: Any, size: int) -> bytes:
    if isinstance(value, TensorMap):
        return value.encode()
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, int):
        return (value % (1 << 8 * size)).to_bytes(size, "little")
    if isinstance(value, float):
        return bytes(ctypes.c_float(value) if size == 4 else ctypes.c_double(value))
    return bytes(value)


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> Module:
    return kept.module_of(text)
