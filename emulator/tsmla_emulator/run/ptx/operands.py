"""Reads the operands of one instruction: registers, literals, addresses and names, as the scopes around it know
them."""

from __future__ import annotations

import re

from .model import (
    Address,
    Entry,
    Immediate,
    Label,
    NotImplementedInstruction,
    Operand,
    Pair,
    PtxError,
    Register,
    Sink,
    Symbol,
    Vector,
)

_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?")
_FLOAT = re.compile(r"0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}")
_NAME_OFFSET = re.compile(r"([%\w$.]+?)\s*(?:\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|0|[1-9]\d*))|(-\s*(?:0|[1-9]\d*)))?")
_SPLIT_NUMBER = re.compile(r"(.*?)(\d+)")


class Scope:
    """The names that a pair of braces declares, inside of its parent's. Scope 0 is the entry's body."""

    def __init__(self, number: int, parent: Scope | None):
        self.number = number
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.labels: dict[str, str] = {}

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}#{self.number}"

    def find_register(self, name: str) -> Register | None:
        scope: Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            numbered = _SPLIT_NUMBER.fullmatch(name)
            if numbered is not None and numbered[1] in scope.ranges:
                count, kind = scope.ranges[numbered[1]]
                if int(numbered[2]) < count:
                    register = Register(scope.unique(name), kind)
                    scope.registers[name] = register
                    return register
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class Operands:
    """Reads the operands of one instruction."""

    def __init__(self, entry: Entry, scope: Scope, text: str, line: int, branch: bool):
        self.entry, self.scope, self.text, self.line, self.branch = entry, scope, text, line, branch

    def read(self, piece: str) -> Operand:
        register = self.scope.find_register(piece)
        if register is not None:
            return register
        if self.branch:
            return Label(piece)
        if piece == "_":
            return Sink()
        if piece.startswith("{"):
            return Vector(tuple(self.read(item) for item in split(piece[1:-1])))
        if piece.startswith("["):
            return self._address(piece[1:-1])
        if piece.count("|") == 1:
            first, second = piece.split("|")
            return Pair(self.read(first.strip()), self.read(second.strip()))
        number = _number(piece)
        if number is not None:
            return number
        return self._named(piece)

    def _address(self, inside: str) -> Address:
        parts = split(inside) or [""]
        base = self.scope.find_register(parts[0]) or _number(parts[0]) or self._named(parts[0])
        vector = self.read(parts[1]) if len(parts) == 2 else Vector(())
        if not isinstance(base, Address | Register | Immediate | Symbol) or not isinstance(vector, Vector):
            raise NotImplementedInstruction(f"address form in {self.text!r}", self.line)
        if len(parts) > 2:
            raise NotImplementedInstruction(f"address form in {self.text!r}", self.line)
        if isinstance(base, Address):
            return Address(base.base, base.offset, vector.items)
        return Address(base, 0, vector.items)

    def _named(self, piece: str) -> Operand:
        found = _NAME_OFFSET.fullmatch(piece)
        if found is None:
            raise PtxError(f"cannot read operand {piece!r} of {self.text!r}", self.line)
        offset = int((found[2] or found[3] or "0").replace(" ", ""), 0)
        register = self.scope.find_register(found[1])
        if register is not None:
            return Address(register, offset)
        if not (found[1].startswith("%") or self._declared(found[1])):
            raise PtxError(f"unknown name {found[1]!r} in {self.text!r}", self.line)
        return Symbol(found[1], offset)

    def _declared(self, name: str) -> bool:
        return name in self.entry.shared or name in ("WARP_SZ",) or any(p.name == name for p in self.entry.params)


def _number(piece: str) -> Immediate | None:
    if _FLOAT.fullmatch(piece):
        return Immediate(int(piece[2:], 16), 4 * (len(piece) - 2))
    if _INTEGER.fullmatch(piece) is None:
        return None
    return Immediate(int(piece.rstrip("U"), 0 if not re.fullmatch(r"-?0\d+U?", piece) else 8))


def split(text: str) -> list[str]:
    """Split at the commas outside braces and brackets."""
    pieces, depth, start = [], 0, 0
    if "{" not in text and "[" not in text:
        return [piece.strip() for piece in text.split(",")] if text.strip() else []
    for index, character in enumerate(text):
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "," and depth == 0:
            pieces.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*pieces, last] if last else pieces
