"""PTX text -> Module. Inline-assembly scopes are flattened: inner registers and labels get unique names."""

from __future__ import annotations

import re

from .model import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Label,
    Module,
    NotImplementedInstruction,
    Operand,
    Pair,
    Param,
    PtxError,
    Register,
    SharedArray,
    Sink,
    Source,
    Symbol,
    Vector,
)

_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([A-Za-z_$%][\w$%]*)\s*:(?!:)")
_STATEMENT = re.compile(r"[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_RANGE = re.compile(r"([%\w$]+?)<(\d+)>")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_NAME_OFFSET = re.compile(r"([%\w$.]+?)\s*(?:\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))|(-\s*\d+))?")
_SPLIT_NUMBER = re.compile(r"(.*?)(\d+)")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "28": 16}


def parse_module(text: str) -> Module:
    """Read a whole PTX text. Raises PtxError naming the line."""
    return _Reader(text).module()


def type_bytes(name: str) -> int:
    """Size of a PTX type name such as "b8", "f32" or "u64"."""
    return _SIZES[name[-2:] if name[-2:] in _SIZES else name[-1]]


class _Scope:
    def __init__(self, number: int, parent: _Scope | None):
        self.number = number
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.ranges: dict[str, tuple[int, str]] = {}
        self.labels: dict[str, str] = {}

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}#{self.number}"

    def find_register(self, name: str) -> Register | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.registers.get(name)
            if found is not None:
                return found
            split = _SPLIT_NUMBER.fullmatch(name)
            if split is not None and split[1] in scope.ranges:
                count, kind = scope.ranges[split[1]]
                if int(split[2]) < count:
                    register = Register(scope.unique(name), kind)
                    scope.registers[name] = register
                    return register
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _Reader:
    def __init__(self, text: str):
        self.original = text
        self.text = _blank_comments(text)
        self.position = 0
        self.counted_to = 0
        self.line = 1
        # The compiler writes .file after the code whose .loc lines refer to it.
        self.files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
        self.shared: dict[str, SharedArray] = {}
        self.entries: dict[str, Entry] = {}
        self.version = self.target = ""

    # -- module level

    def module(self) -> Module:
        while self._skip_space():
            word = self._match(r"\.?\w+")
            if word is None:
                raise PtxError(f"cannot read {self._rest_of_line()!r}", self._line_here())
            if word in (".version", ".target"):
                setattr(self, word[1:], self._rest_of_line().split(",")[0].strip())
                self._skip_line()
            elif word in (".address_size", ".file", ".loc"):
                self._skip_line()
            elif word in (".visible", ".weak", ".extern"):
                continue
            elif word == ".shared":
                array = self._shared_array(self._until_semicolon())
                self.shared[array.name] = array
            elif word == ".entry":
                entry = self._entry()
                self.entries[entry.name] = entry
            elif word == ".section":
                self.position = self.text.index("}", self.position) + 1
            else:
                raise NotImplementedInstruction(f"{word} {self._rest_of_line()}".strip(), self._line_here())
        return Module(self.target, self.version, self.entries, self.original)

    def _shared_array(self, rest: str) -> SharedArray:
        found = re.fullmatch(r"\s*(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*", rest)
        if found is None:
            raise PtxError(f"cannot read .shared {rest.strip()!r}", self._line_here())
        size = type_bytes(found[2])
        count = 1 if found[4] is None else int(found[4] or 0)
        return SharedArray(found[3], size * count, int(found[1] or size))

    def _entry(self) -> Entry:
        line = self._line_here()
        name = self._match(r"\s*[\w$]+")
        if name is None:
            raise PtxError(".entry without a name", line)
        params: tuple[Param, ...] = ()
        size = 0
        if self._match(r"\s*\("):
            end = self.text.index(")", self.position)
            params, size = self._params(self.text[self.position : end])
            self.position = end + 1
        start = self.text.index("{", self.position)
        reqntid = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", self.text[self.position : start])
        threads = None
        if reqntid is not None:
            x, y, z = (int(n or 1) for n in reqntid.groups())
            threads = (x, y, z)
        self.position = start
        entry = Entry(name.strip(), params, size, threads, line=line, shared=dict(self.shared))
        self._body(entry)
        return entry

    def _params(self, text: str) -> tuple[tuple[Param, ...], int]:
        params, offset = [], 0
        for piece in filter(str.strip, text.split(",")):
            found = re.fullmatch(
                r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s[^%]*?\s)?([\w$]+)\s*(?:\[(\d+)\])?\s*", piece
            )
            if found is None:
                raise PtxError(f"cannot read parameter {piece.strip()!r}", self._line_here())
            element = type_bytes(found[2])
            size, align = element * int(found[4] or 1), int(found[1] or element)
            offset = -(-offset // align) * align
            params.append(Param(found[3], offset, size, align))
            offset += size
        return tuple(params), offset

    # -- entry level

    def _body(self, entry: Entry) -> None:
        scope: _Scope | None = None  # the entry's first brace opens the outermost one
        scopes = 0
        source: Source | None = None
        branches: list[tuple[int, _Scope]] = []
        while True:
            if not self._skip_space():
                raise PtxError(f"entry {entry.name} is not closed", entry.line)
            character = self.text[self.position]
            if character == "{":
                scope = _Scope(scopes, scope)
                scopes += 1
                self.position += 1
            elif scope is None:
                raise PtxError(f"cannot read {self._rest_of_line()!r}", self._line_here())
            elif character == "}":
                self.position += 1
                scope = scope.parent
                if scope is None:
                    break
            elif character == ";":
                self.position += 1
            elif character == ".":
                source = self._directive(entry, scope, source)
            elif label := _LABEL.match(self.text, self.position):
                unique = scope.unique(label[1])
                scope.labels[label[1]] = unique
                entry.labels[unique] = len(entry.instructions)
                self.position = label.end()
            else:
                instruction = self._instruction(entry, scope, source)
                if instruction.opcode.startswith("bra"):
                    branches.append((len(entry.instructions), scope))
                entry.instructions.append(instruction)
        for index, where in branches:
            self._resolve(entry.instructions[index], where)

    def _resolve(self, branch: Instruction, scope: _Scope) -> None:
        target = branch.operands[-1]
        found = scope.find_label(target.name) if isinstance(target, Label) else None
        if found is None:
            raise PtxError(f"branch to unknown label in {branch.text!r}", branch.line)
        branch.operands = (Label(found),)

    def _directive(self, entry: Entry, scope: _Scope, source: Source | None) -> Source | None:
        line = self._line_here()
        word = self._match(r"\.\w+")
        if word == ".loc":
            found = re.match(r"\s*(\d+)\s+(\d+)", self._rest_of_line())
            self._skip_line()
            return None if found is None else Source(self.files.get(int(found[1]), f"file {found[1]}"), int(found[2]))
        if word == ".file":
            self._skip_line()
        elif word == ".reg":
            self._registers(scope, self._until_semicolon(), line)
        elif word == ".shared":
            array = self._shared_array(self._until_semicolon())
            entry.shared[array.name] = array
        elif word == ".pragma":
            self._until_semicolon()
        else:
            raise NotImplementedInstruction(f"{word} {self._rest_of_line()}".strip(), line)
        return source

    def _registers(self, scope: _Scope, rest: str, line: int) -> None:
        found = re.fullmatch(r"\s*\.(\w+)\s+(.*)", rest, re.S)
        if found is None:
            raise PtxError(f"cannot read .reg {rest.strip()!r}", line)
        for name in (part.strip() for part in found[2].split(",")):
            ranged = _RANGE.fullmatch(name)
            if ranged is not None:
                scope.ranges[ranged[1]] = (int(ranged[2]), found[1])
            else:
                scope.registers[name] = Register(scope.unique(name), found[1])

    def _instruction(self, entry: Entry, scope: _Scope, source: Source | None) -> Instruction:
        line = self._line_here()
        found = _STATEMENT.match(self.text, self.position)
        if found is None:
            raise PtxError(f"cannot read {self._rest_of_line()!r}", line)
        self.position = found.end()
        text = " ".join(found[0][:-1].split())
        guard = None
        rest = text
        if guarded := _GUARD.match(rest):
            register = scope.find_register(guarded[2])
            if register is None:
                raise PtxError(f"unknown predicate in {text!r}", line)
            guard = (register, guarded[1] == "!")
            rest = rest[guarded.end() :]
        opcode, _, tail = rest.partition(" ")
        operands = _Operands(entry, scope, text, line, opcode.startswith("bra"))
        return Instruction(opcode, tuple(operands.read(p) for p in _split(tail)), line, text, guard, source)

    # -- characters

    def _line_here(self) -> int:
        self.line += self.text.count("\n", self.counted_to, self.position)
        self.counted_to = self.position
        return self.line

    def _skip_space(self) -> bool:
        if found := _SPACE.match(self.text, self.position):
            self.position = found.end()
        return self.position < len(self.text)

    def _match(self, pattern: str) -> str | None:
        found = re.compile(pattern).match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found[0]

    def _rest_of_line(self) -> str:
        end = self.text.find("\n", self.position)
        return self.text[self.position : end if end >= 0 else len(self.text)]

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = end if end >= 0 else len(self.text)

    def _until_semicolon(self) -> str:
        end = self.text.index(";", self.position)
        piece = self.text[self.position : end]
        self.position = end + 1
        return piece


class _Operands:
    """Reads the operands of one instruction."""

    def __init__(self, entry: Entry, scope: _Scope, text: str, line: int, branch: bool):
        self.entry, self.scope, self.text, self.line, self.branch = entry, scope, text, line, branch

    def read(self, piece: str) -> Operand:
        register = self.scope.find_register(piece)
        if register is not None:
            return register
        if self.branch:
            return Label(piece)
        if piece == "_":
            return Sink()
        if piece[0] == "{":
            return Vector(tuple(self.read(item) for item in _split(piece[1:-1])))
        if piece[0] == "[":
            return self._address(piece[1:-1])
        if "|" in piece:
            first, second = piece.split("|")
            return Pair(self.read(first.strip()), self.read(second.strip()))
        number = _number(piece)
        if number is not None:
            return number
        return self._named(piece)

    def _address(self, inside: str) -> Address:
        parts = _split(inside)
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
    if piece[:2] in ("0f", "0F") and len(piece) == 10:
        return Immediate(int(piece[2:], 16), 32)
    if piece[:2] in ("0d", "0D") and len(piece) == 18:
        return Immediate(int(piece[2:], 16), 64)
    if _INTEGER.fullmatch(piece) is None:
        return None
    return Immediate(int(piece.rstrip("U"), 0 if not re.fullmatch(r"-?0\d+U?", piece) else 8))


def _split(text: str) -> list[str]:
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


def _blank_comments(text: str) -> str:
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
