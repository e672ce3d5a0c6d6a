"""Machine code as nvdisasm reads it, in the terms of the decoder that is held against it."""

from __future__ import annotations

import functools
import importlib
import re
import struct
import subprocess
import tempfile
from pathlib import Path

from tsmla_emulator.run.sass.decode import control
from tsmla_emulator.run.sass.model import (
    ALWAYS,
    ALWAYS_DONE,
    BYTES,
    ZERO,
    Address,
    Constant,
    Convergence,
    Descriptor,
    Float,
    Instruction,
    Integer,
    Operand,
    Predicate,
    Predicates,
    Register,
    Scoreboard,
    Special,
    Target,
)

_LINE = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P[\dT]) )?(?P<name>[\w.]+)\s*(?P<operands>[^;]*);"
    r"\s*/\* 0x(?P<low>[0-9a-f]{16}) \*/"
)
_SECOND = re.compile(r"\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/")
_REGISTER = re.compile(r"(?P<uniform>U?)R(?P<number>\d+|Z)(?P<suffixes>(?:\.\w+)*)$")
_PREDICATE = re.compile(r"(?P<negated>!?)(?P<uniform>U?)P(?P<number>\d|T)$")
_INTEGER = re.compile(r"(?P<sign>-?)0x(?P<digits>[0-9a-f]+)$")
_CONSTANT = re.compile(r"c\[(?P<bank>[^\]]+)\]\[(?P<place>[^\]]+)\](?P<suffixes>(?:\.\w+)*)$")
_DESCRIPTOR = re.compile(
    r"(?P<kind>desc|gdesc|idesc|tmem)\[(?P<place>[^\]]+)\](?:\[(?P<address>[^\]]+)\])?(?P<suffixes>(?:\.\w+)*)$"
)
_NAMED = re.compile(r"(?P<kind>B|SB|gsb)(?P<number>\d+)$")
_JUMPS = {"BRA", "BRX", "BSSY", "CALL", "RET", "WARPSYNC"}
"""Opcodes whose last number is a place in the code."""


class TextError(ValueError):
    """Text of nvdisasm that this module does not know."""


def nvdisasm() -> Path:
    """Return the path of nvdisasm. Raises ImportError."""
    for folder in importlib.import_module("nvidia").__path__:
        for found in Path(folder).glob("*/bin/nvdisasm"):
            return found
    raise ImportError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")


def disassembled(code: bytes, architecture: str) -> list[Instruction]:
    """Return instructions as nvdisasm reads them; `architecture` is "sm_90a" or another. Raises TextError."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        command = [str(nvdisasm()), "--binary", architecture.replace("sm_", "SM"), "-ndf", "-hex", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TextError(done.stderr.strip())
    return parsed(done.stdout)


def parsed(text: str) -> list[Instruction]:
    """Return the instructions in text that `nvdisasm --binary ... -hex` printed."""
    lines = [line for line in text.splitlines() if "/*" in line]
    found = []
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        head, tail = _LINE.match(first), _SECOND.match(second)
        if head is None or tail is None:
            raise TextError(f"not an instruction: {first} {second}")
        word = int(tail["high"], 16) << 64 | int(head["low"], 16)
        found.append(_instruction(head, word))
    return found


def _instruction(line: re.Match[str], word: int) -> Instruction:
    opcode, *modifiers = line["name"].split(".")
    bits = control(word)  # the text shows none of it but the marks of reuse
    if line["operands"].count(".reuse") != bits.reuse.bit_count():
        raise TextError(f"{bits.reuse:#b} does not mark the operands of {line['name']} {line['operands']}")
    return Instruction(
        int(line["address"], 16),
        _predicate(line["guard"]) if line["guard"] else ALWAYS_DONE,
        opcode,
        tuple(modifiers),
        tuple(_operands(opcode, modifiers, line["operands"], word, int(line["address"], 16))),
        bits,
    )


def _operands(opcode: str, modifiers: list[str], text: str, word: int, address: int) -> list[Operand]:
    if opcode in ("BRX", "RET"):  # a register and a place, with no comma between them
        text = text.strip().replace(" ", ", ", 1)
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    packed, bf16 = opcode in ("HADD2", "HFMA2"), "BF16_V2" in modifiers
    found: list[Operand] = []
    for position, part in enumerate(parts):
        if "QNAN" in part or "SNAN" in part:  # the text has no payload
            number = word >> 32 & 0xFFFFFFFF
            high_half = position == len(parts) - 2
            found.append(Float(number >> 16 if high_half else number & 0xFFFF, 16) if packed else Float(number))
        else:
            found.append(_plain(part, packed, bf16))
    if opcode == "BRX" and len(found) == 1:  # a distance of 0 is not printed
        found.append(Integer(0))
    if opcode in _JUMPS and found and isinstance(found[-1], Integer):
        # of BRX, the distance from the next instruction is printed
        found[-1] = Target(found[-1].value + (address + BYTES if opcode == "BRX" else 0))
    return found


@functools.cache
def _plain(text: str, packed: bool, bf16: bool) -> Operand:
    if text in ("PR", "UPR"):
        return Predicates(text == "UPR")
    if text.startswith("SR"):
        return Special(text)
    if _PREDICATE.match(text):
        return _predicate(text)
    if match := _INTEGER.match(text):
        return Integer(int(match["sign"] + match["digits"], 16))
    if match := _NAMED.match(text):
        number = int(match["number"])
        return Convergence(number) if match["kind"] == "B" else Scoreboard(match["kind"], number)
    if text.startswith("["):
        return _address(text[1:-1])
    if match := _DESCRIPTOR.match(text):
        where = _address(match["place"])
        register = where.uniform or Register(ZERO, uniform=True)  # of which nothing is printed before an offset
        inner = _address(match["address"]) if match["address"] else None
        return Descriptor(match["kind"], register, where.offset, inner, _suffixes(match["suffixes"]))
    if re.match(r"[-+]?(\d|INF)", text):
        return _float(text, packed, bf16)
    return _source(text)


def _source(text: str) -> Operand:
    """A register or constant, with its signs."""
    kept = text.replace(".reuse", "")
    negated, kept = kept.startswith("-"), kept.removeprefix("-")
    inverted, kept = kept.startswith("~"), kept.removeprefix("~")
    absolute = kept.startswith("|")
    if absolute:
        inside, behind = kept[1:].split("|")
        kept = inside + behind
    if match := _CONSTANT.match(kept):
        bank = _register(match["bank"]) if "R" in match["bank"] else int(match["bank"], 16)
        where = _address(match["place"])
        index = where.base or where.uniform
        return Constant(bank, where.offset, index, negated, absolute, inverted, _suffixes(match["suffixes"]))
    plain = _register(kept)
    return Register(plain.number, plain.uniform, negated, absolute, inverted, plain.suffixes)


def _float(text: str, packed: bool, bf16: bool) -> Float:
    value = float(text)
    if not packed:
        return Float(struct.unpack("<I", struct.pack("<f", value))[0])
    if bf16:
        return Float(struct.unpack("<I", struct.pack("<f", value))[0] >> 16, 16)
    return Float(struct.unpack("<H", struct.pack("<e", value))[0], 16)


def _address(text: str) -> Address:
    base, uniform, offset = None, None, 0
    for part in text.split("+"):
        if match := _INTEGER.match(part):
            offset = int(match["sign"] + match["digits"], 16)
        elif part.startswith("U"):
            uniform = _register(part)
        else:
            base = _register(part)
    return Address(base, uniform, offset)


def _register(text: str) -> Register:
    match = _REGISTER.match(text)
    if match is None:
        raise TextError(f"not an operand: {text}")
    number = ZERO if match["number"] == "Z" else int(match["number"])
    return Register(number, bool(match["uniform"]), suffixes=_suffixes(match["suffixes"]))


def _predicate(text: str) -> Predicate:
    match = _PREDICATE.match(text)
    if match is None:
        raise TextError(f"not a predicate: {text}")
    number = ALWAYS if match["number"] == "T" else int(match["number"])
    return Predicate(number, bool(match["uniform"]), bool(match["negated"]))


def _suffixes(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(".") if part)
