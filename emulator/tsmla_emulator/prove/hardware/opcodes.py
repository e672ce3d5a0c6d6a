"""Runs each form of instruction that shipped kernels have on a GPU, by itself, and compares the emulator bit for bit.

    python -m tsmla_emulator.prove.hardware.opcodes record FILE.npz --commit HASH [LIBRARY...]
    python -m tsmla_emulator.prove.hardware.opcodes compare FILE.npz

A form is an opcode with its modifiers, the kinds and signs of its operands, and its numbers. The kernels that run them
are made here: instruction words are the shipped ones, with other registers. Each thread loads words into the registers
that an instruction reads and writes, and into all predicates, runs it, and stores results and predicates. A record
holds the kernels, so that the emulator runs the very same.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import datetime
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tsmla.loading import toolchain
from tsmla.loading.elf import Elf

from ...run.machine import Launch, Options, Region, run_launches
from ...run.sass.code import text_of
from ...run.sass.decode import decoder_for
from ...run.sass.fields import Const, Field, Reg
from ...run.sass.forms import CONTROL
from ...run.sass.image import kernels
from ...run.sass.model import (
    ALWAYS,
    BYTES,
    ZERO,
    Constant,
    Float,
    Instruction,
    Integer,
    MachineCodeError,
    Operand,
    Predicate,
    Register,
    Special,
)
from ...run.sass.program import machine_code_module

ARCH = "sm_90a"
_ONLY = (
    "ELECT F2FP F2I FADD FCHK FFMA FMNMX FMUL FSEL FSETP HADD2 HFMA2 HMMA HMNMX2 I2F IABS IADD3 IMAD ISETP LEA LOP3 "
    "MOV MUFU P2R PLOP3 POPC PRMT R2P REDUX SEL SHF SHFL UIADD3 UIMAD UISETP ULEA ULOP3 UMOV UP2UR UPLOP3 UPOPC UPRMT "
    "USEL USHF VHMNMX VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE VOTEU"
).split()
"""Opcodes whose results follow from registers alone."""
_EVERY_NUMBER = {"LOP3", "ULOP3", "PLOP3", "UPLOP3", "PRMT", "UPRMT"}
_NUMBERS = 4
"""How many of the numbers that an instruction has in shipped kernels are tried, but for those that say what it does."""

_SOURCES, _UNIFORM_SOURCES = (8, 12, 16, 20), (8, 12, 16, 20)
_RESULT, _PREDICATES, _UNIFORM_RESULT, _UNIFORM_PREDICATES = 24, 28, 24, 26
_UNIFORM_WORDS = 32
"""Registers: each source has four, as the widest need them; uniform words are loaded into those from 32 on."""
_UNIFORM_PREDICATES_SET = 4
WORDS_IN, WORDS_UNIFORM, WORDS_LEFT = 32, 32, 8
"""Words for each thread (a row), for each CTA, and those that each thread stores for each form: four of the result,
predicates, uniform predicates, two unused."""
CTAS, LANES = 32, 32
_PARAMETERS = 768
_AT_ONCE = 128
"""Forms in a kernel."""
_WAIT_ALL = 63 << 116 | 15 << 105 | 7 << 110 | 7 << 113
"""Bits for the scheduler: await all scoreboards, and have the next instruction wait 15 clocks."""
_TIMED_BY_SCOREBOARD = _WAIT_ALL & ~(7 << 110)
"""... and free scoreboard 0 when the result is there."""


@dataclasses.dataclass(frozen=True)
class Tried:
    """An instruction word, without bits for the scheduler."""

    word: int

    def text(self) -> str:
        """Return the instruction as nvdisasm prints it."""
        return text_of(_instruction(self.word))


def _instruction(word: int) -> Instruction:
    return decoder_for(ARCH).instruction(word & ~CONTROL | _WAIT_ALL & ~(63 << 116), 0)


def shipped_words(libraries: Iterable[Path]) -> dict[int, bool]:
    """Return the instruction words in libraries or objects, without bits for the scheduler, and whether instructions
    of that code free a scoreboard with their result."""
    found: set[int] = set()
    variable: dict[int, bool] = collections.defaultdict(bool)
    for library in libraries:
        for kernel in kernels(library):
            if kernel.architecture != ARCH:
                continue
            for at in range(0, len(kernel.code), BYTES):
                word = int.from_bytes(kernel.code[at : at + BYTES], "little")
                found.add(word & ~CONTROL)
                variable[word & 0xFFF] |= word >> 110 & 7 != 7
    return {word: variable[word & 0xFFF] for word in found}


def tried(words: dict[int, bool]) -> list[Tried]:
    """Return a word for each form, with registers of its own, and a few of its numbers."""
    forms: dict[tuple, dict[tuple, int]] = collections.defaultdict(dict)
    for word in sorted(words):
        instruction = _instruction(word)
        if instruction.opcode in _ONLY:
            kinds = (instruction.name, instruction.guard.uniform, *map(_kind, instruction.operands))
            numbers = tuple(x for x in instruction.operands if isinstance(x, Integer | Float))
            forms[kinds].setdefault(numbers, word)
    chosen = []
    for (name, *_), of_numbers in sorted(forms.items(), key=lambda item: str(item[0])):
        every = name.split(".")[0] in _EVERY_NUMBER
        chosen += [*of_numbers.values()][: None if every else _NUMBERS]
    return [Tried(_with_own_registers(word)) for word in chosen]


def _kind(operand: Operand) -> tuple:
    match operand:
        case Register():
            signs = operand.negated, operand.absolute, operand.inverted
            return "register", operand.uniform, *signs, operand.suffixes, operand.number == ZERO
        case Predicate():
            return "predicate", operand.uniform, operand.negated, operand.number == ALWAYS
        case Constant():
            return "constant", operand.negated, operand.absolute
        case _:
            return (type(operand).__name__,)


def _fields(word: int) -> Iterator[Reg]:
    """Yield the fields of registers that are not RZ."""
    for field in decoder_for(ARCH).form(word).operands:
        if isinstance(field, Reg) and field.number(word) != ZERO and not field.again:
            yield field


def _put(word: int, field: Field, first: int, width: int, value: int) -> int:
    return word & ~((1 << width) - 1 << first) | value << first


def _with_own_registers(word: int) -> int:
    """Return a word whose guard is always true, whose result is R24 or UR24 and whose sources are R8, R12, .. or UR8,
    UR12, .., whose constants are parameters."""
    sources = {False: iter(_SOURCES), True: iter(_UNIFORM_SOURCES)}
    results = {False: _RESULT, True: _UNIFORM_RESULT}
    word |= 7 << 12
    word &= ~(1 << 15)
    for field in list(_fields(word)):
        number = results[field.uniform] if field.first == 16 else next(sources[field.uniform])
        word = _put(word, field, field.first, field.width, number)
    for operand in decoder_for(ARCH).form(word).operands:
        if isinstance(operand, Const):
            raise MachineCodeError("constants are not tried")
    return word


class Helpers:
    """Words of instructions around the tried one, made of shipped ones."""

    def __init__(self, words: dict[int, bool]):
        self._by_name: dict[str, list[int]] = collections.defaultdict(list)
        self._variable = {word & 0xFFF for word, variable in words.items() if variable}
        for word in sorted(words):
            self._by_name[_instruction(word).name].append(word)

    def variable(self, word: int) -> bool:
        """Return whether a scoreboard says when the result of such an instruction is there."""
        return word & 0xFFF in self._variable

    def find(self, name: str, matches: Callable[[Instruction], bool] = lambda _: True) -> int:
        """Return a word of this name, its guard always true. Raises LookupError."""
        for word in self._by_name[name]:
            if matches(_instruction(word | 7 << 12)):
                return (word | 7 << 12) & ~(1 << 15)
        raise LookupError(name)

    def load(self, to: int, base: int, offset: int) -> int:
        word = self.find("LDG.E.128")
        return _set(word, {(16, 8): to, (24, 8): base, (32, 6): 4, (40, 24): offset, (64, 8): 0})

    def store(self, base: int, offset: int, value: int) -> int:
        word = self.find("STG.E.128")
        return _set(word, {(24, 8): base, (32, 8): value, (40, 24): offset, (64, 6): 4})

    def address(self, to: int, index: int, size: int, base: int) -> int:
        """to = index * size + base, all of 64 bits but the index."""
        word = self.find("IMAD.WIDE.U32", lambda i: isinstance(i.operands[2], Integer) and len(i.operands) == 4)
        return _set(word, {(16, 8): to, (24, 8): index, (32, 32): size, (64, 8): base})

    def special(self, to: int, name: str) -> int:
        word = self.find("S2R", lambda i: i.operands[1] == Special(name))
        return _set(word, {(16, 8): to})

    def parameter(self, to: int, offset: int) -> int:
        word = self.find("LDC.64", lambda i: getattr(i.operands[1], "index", 1) is None)
        return _set(word, {(16, 8): to, (24, 8): 255, (38, 16): offset})

    def descriptor(self) -> int:
        """UR4 and UR5: what loads and stores of global memory name."""
        word = self.find("ULDC.64", lambda i: i.operands[1] == Constant(0, 0x208))
        return _set(word, {(16, 6): 4})

    def to_uniform(self, to: int, source: int) -> int:
        word = self.find("R2UR", lambda i: len(i.operands) == 2)
        return _set(word, {(16, 6): to, (24, 8): source})

    def from_uniform(self, to: int, source: int) -> int:
        def moves(i: Instruction) -> bool:
            a, b, c = i.operands[1:]
            return a == b == Register(ZERO) and isinstance(c, Register) and c.uniform and not c.negated

        return _set(self.find("IMAD.U32", moves), {(16, 8): to, (32, 6): source})

    def set_predicates(self, source: int) -> int:
        word = self.find("R2P", lambda i: not getattr(i.operands[1], "suffixes", ()))
        return _set(word, {(24, 8): source, (32, 8): 0x7F})

    def get_predicates(self, to: int) -> int:
        return _set(self.find("P2R"), {(16, 8): to, (24, 8): 255, (32, 32): 0x7F, (76, 2): 0})

    def set_uniform_predicate(self, number: int, source: int) -> int:
        """True where a uniform register is not 0."""
        plain = (Predicate(ALWAYS, True), Register(ZERO, True), Predicate(ALWAYS, True))

        def matches(i: Instruction) -> bool:
            return (i.operands[1], i.operands[3], i.operands[4]) == plain

        return _set(self.find("UISETP.NE.U32.AND", matches), {(81, 3): number, (24, 6): source})

    def get_uniform_predicates(self, to: int) -> int:
        return _set(self.find("UP2UR"), {(16, 6): to, (24, 6): 63, (32, 32): 0x7F})

    def plain(self, name: str) -> int:
        return self.find(name)


def _set(word: int, values: dict[tuple[int, int], int]) -> int:
    for (first, width), value in values.items():
        word = word & ~((1 << width) - 1 << first) | value << first
    return word


def code_of(forms: Sequence[Tried], helpers: Helpers) -> bytes:
    """Return the machine code of a kernel that tries these forms."""
    out: list[int] = []

    def add(word: int) -> None:
        out.append(word & ~CONTROL | (_TIMED_BY_SCOREBOARD if helpers.variable(word) else _WAIT_ALL))

    add(helpers.descriptor())
    for to, place in ((40, 0x210), (42, 0x218), (44, 0x220)):
        add(helpers.parameter(to, place))
    add(helpers.special(0, "SR_TID.X"))
    add(helpers.special(1, "SR_CTAID.X"))
    add(helpers.address(6, 1, 4 * WORDS_UNIFORM, 44))
    add(helpers.address(2, 1, 4 * WORDS_IN * LANES, 40))
    add(helpers.address(2, 0, 4 * WORDS_IN, 2))
    add(helpers.address(4, 1, 4 * WORDS_LEFT * LANES, 42))
    add(helpers.address(4, 0, 4 * WORDS_LEFT, 4))
    nop = helpers.plain("NOP")
    for number, form in enumerate(forms):
        for i in range(6):
            add(helpers.load(8 + 4 * i, 2, 16 * i))
        uniform = _is_uniform(form.word)
        if uniform:
            for i in range(7):
                add(helpers.load(_UNIFORM_WORDS + 4 * i, 6, 16 * i))
            for i in range(20):
                add(helpers.to_uniform(8 + i, _UNIFORM_WORDS + i))
            for i in range(_UNIFORM_PREDICATES_SET):
                add(helpers.to_uniform(30, _UNIFORM_WORDS + 20 + i))
                add(nop)
                add(helpers.set_uniform_predicate(i, 30))
        add(helpers.load(_PREDICATES, 2, 16 * 6))
        add(helpers.set_predicates(_PREDICATES))
        add(nop)
        add(form.word)
        add(nop)
        add(nop)
        add(helpers.get_predicates(_PREDICATES))
        if uniform:
            add(helpers.get_uniform_predicates(_UNIFORM_PREDICATES))
            add(nop)
            add(helpers.from_uniform(_PREDICATES + 1, _UNIFORM_PREDICATES))
            if _uniform_result(form.word):
                for i in range(2):
                    add(helpers.from_uniform(_RESULT + i, _UNIFORM_RESULT + i))
        place = number * 4 * WORDS_LEFT * LANES * CTAS
        add(nop)
        add(helpers.store(4, place, _RESULT))
        add(helpers.store(4, place + 16, _PREDICATES))
    add(helpers.plain("EXIT"))
    return b"".join(word.to_bytes(BYTES, "little") for word in out)


def _is_uniform(word: int) -> bool:
    return any(getattr(operand, "uniform", False) for operand in _instruction(word).operands)


def _reads_what_nothing_sets(word: int) -> bool:
    return any(
        isinstance(operand, Predicate) and operand.uniform and _UNIFORM_PREDICATES_SET <= operand.number < ALWAYS
        for operand in _instruction(word).operands
    )


def _uniform_result(word: int) -> bool:
    return any(field.uniform and field.first == 16 for field in _fields(word))


def template() -> bytes:
    """Return an image with a kernel `k` that has room for code, and registers, as ptxas makes it."""
    lines = [".version 8.0", f".target {ARCH}", ".address_size 64"]
    lines += [f".visible .entry k(.param .align 8 .b8 p[{_PARAMETERS}])", f".reqntid {LANES}", "{"]
    lines += [".reg .b32 %r<70>;", ".reg .b64 %d<3>;", "ld.param.u64 %d1, [p];", "ld.param.u64 %d2, [p+8];"]
    for place in range(0, 256 * 64, 256):
        lines += [f"ld.volatile.global.u32 %r{i}, [%d1+{place + 4 * i}];" for i in range(60)]
        lines += [f"st.volatile.global.u32 [%d2+{place + 4 * i}], %r{59 - i};" for i in range(60)]
    with tempfile.TemporaryDirectory() as scratch:
        text, image = Path(scratch) / "k.ptx", Path(scratch) / "k.cubin"
        text.write_text("\n".join([*lines, "ret;", "}", ""]))
        subprocess.run(["ptxas", f"-arch={ARCH}", str(text), "-o", str(image)], check=True)
        return image.read_bytes()


def with_code(image: bytes, code: bytes) -> bytes:
    """Return an image whose kernel has this code, and EXIT behind it. Raises ValueError when there is no room."""
    before = next(s for s in Elf(image).sections if s.name == ".text.k").data
    if len(code) > len(before):
        raise ValueError(f"{len(code)} bytes of code for {len(before)}")
    end = code[-BYTES:]
    after = code + end * ((len(before) - len(code)) // BYTES)
    at = image.index(before)
    return image[:at] + after + image[at + len(before) :]


EDGES = np.array(
    [0, 1, 2, 3, 15, 16, 31, 32, 33, 63, 64, 0x7F, 0x80, 0xFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001,
     0xFFFFFFFF, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00800000,
     0x007FFFFF, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x43E00000, 0x43E80000, 0x477FE000, 0x477FF000, 0x3B000000,
     0x3A800000, 0x33800000, 0x7C007C00, 0xFC007E01, 0x7F807F80, 0xFF807FC1, 0x80000001, 0x00018001, 0x03FF83FF,
     0x7BFFFBFF, 0x3C00BC00, 0x3F80BF80, 0x7E7F7EFF, 0x7C7B7D7F, 0x00800080, 0x42FE0000, 0xC2FC0000, 0xC3150000,
     0x4B800000, 0x4F000000, 0xCF000000, 0x5F000000, 0x3F7FFFFF, 0x3F800001], np.uint32,
)  # fmt: skip
"""Words at the edges of integers, floats, pairs of halves and four small floats."""


def inputs(rows: int, width: int, seed: int) -> np.ndarray:
    """Return words: edges, random bits, random floats of moderate size, small integers."""
    source = np.random.Generator(np.random.PCG64(seed))
    shape = rows, width
    moderate = (source.integers(0, 1 << 23, shape, np.uint32) | source.integers(100, 156, shape, np.uint32) << 23
                | source.integers(0, 2, shape, np.uint32) << 31)  # fmt: skip
    choices = [
        EDGES[source.integers(0, len(EDGES), shape)], source.integers(0, 1 << 32, shape, np.uint32), moderate,
        source.integers(0, 70, shape, np.uint32),
    ]  # fmt: skip
    return np.choose(source.choice(4, shape, p=[0.35, 0.25, 0.3, 0.1]), choices).astype(np.uint32)


def given() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return words for threads, for CTAs, and the block of parameters."""
    uniform = inputs(CTAS, WORDS_UNIFORM, 2)
    uniform[:, 20:24] &= 1
    return inputs(CTAS * LANES, WORDS_IN, 1), uniform, inputs(1, _PARAMETERS // 4, 3)[0]


def _changed(left: np.ndarray) -> np.ndarray:
    """Return stored words without, or again with, what was loaded into their registers: most of them do not change."""
    return left ^ given()[0][: left.shape[1], [16, 17, 18, 19, 24, 25, 26, 27]]


def _block(words: np.ndarray, *addresses: int) -> bytes:
    return b"".join(address.to_bytes(8, "little") for address in addresses) + words.tobytes()[8 * len(addresses) :]


def emulated(image: Path, count: int) -> np.ndarray:
    """Return what a kernel that tries so many forms leaves in the emulator."""
    threads, uniform, parameters = given()
    left = np.zeros((count, CTAS * LANES, WORDS_LEFT), np.uint32)
    arrays = threads, left, uniform
    module = machine_code_module(image, frozenset(["k"]))
    regions = [Region(x.ctypes.data, x.nbytes, name) for x, name in zip(arrays, ("in", "out", "uniform"), strict=True)]
    block = _block(parameters, *(x.ctypes.data for x in arrays))
    launch = Launch("k", (CTAS, 1, 1), (LANES, 1, 1), (1, 1, 1), 0, block)
    run_launches(module, [launch], regions, Options(hardware_sums=True))
    return left


class Driver:
    """The few functions of CUDA's driver that loading and launching an image take."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {status}")

    def put(self, array: np.ndarray) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
        self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        return address

    def get(self, array: np.ndarray, address: ctypes.c_uint64) -> None:
        self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(array.ctypes.data), address, ctypes.c_size_t(array.nbytes))

    def launch(self, image: bytes, name: str, grid: int, threads: int, parameters: Sequence[bytes]) -> None:
        """Run a kernel of an image, and wait for its end. parameters: the bytes of each."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        buffers = [ctypes.create_string_buffer(content, len(content)) for content in parameters]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        sizes = [ctypes.c_uint(x) for x in (grid, 1, 1, threads, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *sizes, ctypes.c_void_p(), pointers, ctypes.c_void_p())
        self.call("cuCtxSynchronize")


def on_gpu(image: bytes, count: int) -> np.ndarray:
    """Return what a kernel leaves on the GPU."""
    driver = Driver()
    threads, uniform, parameters = given()
    left = np.zeros((count, CTAS * LANES, WORDS_LEFT), np.uint32)
    places = [driver.put(array) for array in (threads, left, uniform)]
    driver.launch(image, "k", CTAS, LANES, [_block(parameters, *(place.value for place in places))])
    driver.get(left, places[1])
    return left


def _in_own_process(image: bytes, count: int) -> np.ndarray | str:
    """Return what `on_gpu` does, or what went wrong: a GPU error ends a process's use of the GPU."""
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply_async(on_gpu, (image, count)).get(60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def record(file: Path, commit: str, libraries: Sequence[Path]) -> int:
    """Write kernels and what they left on the GPU. A kernel that fails is divided until the form is found."""
    libraries = libraries or sorted(toolchain.shipped_libraries().glob(f"*{ARCH}*.so"))
    words = shipped_words(libraries)
    helpers, forms, image = Helpers(words), tried(words), template()
    print(f"{len(forms)} forms of {len(words)} words", flush=True)
    arrays: dict[str, Any] = {}
    failed: list[str] = []

    def run(some: list[Tried]) -> None:
        started = time.perf_counter()
        kernel = with_code(image, code_of(some, helpers))
        left = _in_own_process(kernel, len(some))
        if not isinstance(left, str):
            number = len(arrays) // 2
            arrays[f"kernel{number}"] = np.frombuffer(kernel, np.uint8)
            arrays[f"left{number}"] = np.ascontiguousarray(_changed(left).transpose(0, 2, 1))
            print(f"{len(some)} forms, {time.perf_counter() - started:.1f} s", flush=True)
        elif len(some) == 1:
            failed.append(f"{some[0].text()}: {left}")
            print(failed[-1], flush=True)
        else:
            run(some[: len(some) // 2])
            run(some[len(some) // 2 :])

    for at in range(0, len(forms), _AT_ONCE):
        run(forms[at : at + _AT_ONCE])
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.splitlines()[:1]
    said = f"{device}; {' '.join(sys.argv)}; {datetime.date.today().isoformat()}; commit {commit}"
    arrays |= {"certificate": np.array(said), "failed": np.array(failed, str), "threads": given()[0]}
    np.savez_compressed(file, **arrays)
    print(f"{len(forms) - len(failed)} of {len(forms)} forms recorded: {said}")
    return len(failed)


def tried_in(image: Path) -> list[Tried]:
    """Return the instructions that a recorded kernel tries: those between two NOPs before and two behind."""
    (kernel,) = kernels(image)
    words = [int.from_bytes(kernel.code[at : at + BYTES], "little") for at in range(0, len(kernel.code), BYTES)]
    nop = [word & 0xFFF == 0x918 for word in words]
    return [
        Tried(words[i] & ~CONTROL)
        for i in range(1, len(words) - 2)
        if nop[i - 1] and nop[i + 1] and nop[i + 2] and not nop[i]
    ]


def compare(file: Path) -> list[str]:
    """Run recorded kernels in the emulator; print forms that differ, and return them. A record may have fewer threads
    than ran."""
    recorded = np.load(file)
    print(recorded["certificate"], *recorded["failed"], sep="\n")
    threads, uniform, _ = given()
    if not np.array_equal(threads, recorded["threads"]):
        raise ValueError("this NumPy draws other numbers than the one that the record was made with")
    differing: list[str] = []
    total = 0
    for name in sorted(recorded.files):
        if not name.startswith("kernel"):
            continue
        hardware = _changed(recorded[name.replace("kernel", "left")].transpose(0, 2, 1))
        count = hardware.shape[1]
        with tempfile.TemporaryDirectory() as scratch:
            image = Path(scratch) / "k.cubin"
            image.write_bytes(recorded[name].tobytes())
            forms = tried_in(image)
            left = emulated(image, len(hardware))
        total += len(forms)
        for form, ours, theirs in zip(forms, left, hardware, strict=True):
            if _reads_what_nothing_sets(form.word):
                continue
            differ = ours[:count] ^ theirs
            if _is_uniform(form.word):
                differ[:, 5] &= (1 << _UNIFORM_PREDICATES_SET) - 1  # nothing sets the others
            wrong = differ.any(-1)
            if wrong.any():
                differing.append(form.text())
                row = int(wrong.argmax())
                print(f"{form.text()}: {wrong.sum()} of {len(wrong)} threads differ; thread {row}")
                print("    in ", *(f"{word:08x}" for word in threads[row, :29]))
                if _is_uniform(form.word):
                    print("    uniform", *(f"{word:08x}" for word in uniform[row // LANES, :24]))
                print("    gpu     ", *(f"{word:08x}" for word in theirs[row, :6]))
                print("    emulator", *(f"{word:08x}" for word in ours[row, :6]))
    print(f"{len(differing)} of {total} forms differ")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    recording, comparing = ways.add_parser("record"), ways.add_parser("compare")
    for way in (recording, comparing):
        way.add_argument("file", type=Path)
    recording.add_argument("libraries", type=Path, nargs="*")
    recording.add_argument("--commit", required=True)
    options = parser.parse_args()
    if options.way == "record":
        return 1 if record(options.file, options.commit, options.libraries) else 0
    return 1 if compare(options.file) else 0


if __name__ == "__main__":
    sys.exit(main())
