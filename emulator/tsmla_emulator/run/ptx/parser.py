"""Reads PTX text into a Module. Inline-assembly scopes are flattened: inner registers and labels get unique names."""

from __future__ import annotations

import re

from . import calls
from .model import (
    Entry,
    Instruction,
    Label,
    Module,
    NotImplementedInstruction,
    Param,
    PtxError,
    Register,
    SharedArray,
    Source,
)
from .operands import Operands, Scope, split

_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([A-Za-z_$%][\w$%]*)\s*:(?!:)")
_STATEMENT = re.compile(r"[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+")
_RANGE = re.compile(r"([%\w$]+?)<(\d+)>")
_TYPE = r"\.([a-z]+(?:8|16|32|64|128))"
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "28": 16}


def parse_module(text: str) -> Module:
    """Read a whole PTX text. Raises PtxError naming the line."""
    return _Reader(text).module()


def type_bytes(name: str) -> int:
    """Return the size of a PTX type name such as "b8", "f32" or "u64"."""
    return _SIZES[name[-2:] if name[-2:] in _SIZES else name[-1]]


class _Reader:
    def __init__(self, text: str):
        self.original = text
        self.text = _blank_comments(text)
        self.position = 0
        self.counted_to = 0
        self.line = 1
        # The compiler writes .file after the code whose .loc lines refer to it.
        self.files = {int(n): name for n, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE)}
        self.calls = calls.read(text)
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
                self.position = self._next("}") + 1
            else:
                raise NotImplementedInstruction(f"{word} {self._rest_of_line()}".strip(), self._line_here())
        return Module(self.target, self.version, self.entries, self.original)

    def _shared_array(self, rest: str) -> SharedArray:
        found = re.fullmatch(rf"\s*(?:\.align\s+(\d+)\s+)?{_TYPE}\s+([\w$]+)\s*(?:\[(\d*)\])?\s*", rest)
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
            end = self._next(")")
            params, size = self._params(self.text[self.position : end])
            self.position = end + 1
        start = self._next("{")
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
                rf"\s*\.param\s+(?:\.align\s+(\d+)\s+)?{_TYPE}\s+(?:\.ptr\s[^%]*?\s)?([\w$]+)\s*(?:\[(\d+)\])?\s*",
                piece,
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
        scope: Scope | None = None  # the entry's first brace opens the outermost one
        scopes = 0
        source: Source | None = None
        branches: list[tuple[int, Scope]] = []
        while True:
            if not self._skip_space():
                raise PtxError(f"entry {entry.name} is not closed", entry.line)
            character = self.text[self.position]
            if character == "{":
                scope = Scope(scopes, scope)
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

    def _resolve(self, branch: Instruction, scope: Scope) -> None:
        target = branch.operands[-1] if branch.operands else None
        found = scope.find_label(target.name) if isinstance(target, Label) else None
        if found is None:
            raise PtxError(f"branch to unknown label in {branch.text!r}", branch.line)
        branch.operands = (Label(found),)

    def _directive(self, entry: Entry, scope: Scope, source: Source | None) -> Source | None:
        line = self._line_here()
        word = self._match(r"\.\w+")
        if word == ".loc":
            found = re.match(r"\s*(\d+)\s+(\d+)\s*(\d*)", self._rest_of_line())
            self._skip_line()
            if found is None:
                return None
            file = self.files.get(int(found[1]), f"file {found[1]}")
            return Source(file, int(found[2]), self.calls.get(int(found[3] or 0), ()))
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

    def _registers(self, scope: Scope, rest: str, line: int) -> None:
        found = re.fullmatch(r"\s*\.(\w+)\s+(.*)", rest, re.S)
        if found is None:
            raise PtxError(f"cannot read .reg {rest.strip()!r}", line)
        for name in (part.strip() for part in found[2].split(",")):
            ranged = _RANGE.fullmatch(name)
            if ranged is not None:
                scope.ranges[ranged[1]] = (int(ranged[2]), found[1])
            else:
                scope.registers[name] = Register(scope.unique(name), found[1])

    def _instruction(self, entry: Entry, scope: Scope, source: Source | None) -> Instruction:
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
        operands = Operands(entry, scope, text, line, opcode.startswith("bra"))
        return Instruction(opcode, tuple(operands.read(p) for p in split(tail)), line, text, guard, source)

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

    def _next(self, character: str) -> int:
        """Position of the next such character."""
        found = self.text.find(character, self.position)
        if found < 0:
            raise PtxError(f"no {character!r} behind {self._rest_of_line().strip()!r}", self._line_here())
        return found

    def _until_semicolon(self) -> str:
        end = self._next(";")
        piece = self.text[self.position : end]
        self.position = end + 1
        return piece


def _blank_comments(text: str) -> str:
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
