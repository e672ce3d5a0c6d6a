"""Checks that x86-64 machine code stays within the baseline (SSE2, no extension), by decoding lengths of instructions.

The code is walked from its first byte to its last, and only opcodes that every x86-64 processor has are known:
everything else (AVX and later by their VEX and EVEX prefixes, SSE3 to SSE4, BMI, POPCNT, MOVBE, CMPXCHG16B, ...) is
reported. A walk that loses its place meets such a byte soon, so an error here can only reject too much.
"""

from __future__ import annotations

from collections.abc import Iterator

_LEGACY = {0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3}


def _expand(*ranges: int | tuple[int, int]) -> frozenset[int]:
    spans = [(r, r) if isinstance(r, int) else r for r in ranges]
    return frozenset(value for low, high in spans for value in range(low, high + 1))


_ALU = [base + n for base in range(0, 0x40, 8) for n in range(4)]
_ONE_MODRM = _expand(*_ALU, 0x63, 0x69, 0x6B, (0x80, 0x81), (0x83, 0x8B), 0x8D, 0x8F, (0xC0, 0xC1), (0xC6, 0xC7),
                     (0xD0, 0xD3), (0xD8, 0xDF), (0xF6, 0xF7), (0xFE, 0xFF))  # fmt: skip
_ONE_PLAIN = _expand((0x50, 0x5F), (0x90, 0x99), (0x9B, 0x9F), (0xA4, 0xA7), (0xAA, 0xAF), 0xC3, 0xC9, 0xCB, 0xCC, 0xCF,
                     (0xEC, 0xEF), 0xF4, 0xF5, (0xF8, 0xFD))  # fmt: skip
_ONE_BYTE = _expand(*range(4, 0x40, 8), 0x6A, 0x6B, (0x70, 0x7F), 0x80, 0x83, 0xA8, (0xB0, 0xB7), (0xC0, 0xC1), 0xC6,
                    0xCD, (0xE0, 0xE7), 0xEB)  # fmt: skip
_ONE_WORD = _expand(*range(5, 0x40, 8), 0x68, 0x69, 0x81, 0xA9, 0xC7)
_TWO_MODRM = _expand((0x10, 0x17), (0x18, 0x1F), (0x28, 0x2F), (0x40, 0x76), 0x7E, 0x7F, (0x90, 0x9F), (0xA3, 0xA5),
                     (0xAB, 0xAF), (0xB0, 0xB1), 0xB3, 0xB6, 0xB7, (0xBA, 0xC7), (0xD1, 0xEF),
                     (0xF1, 0xFE))  # fmt: skip
_TWO_PLAIN = _expand(0x05, 0x0B, 0x31, 0x77, (0xA0, 0xA2), (0xA8, 0xA9), (0xC8, 0xCF))
_TWO_BYTE = _expand((0x70, 0x73), 0xA4, 0xAC, 0xBA, 0xC2, (0xC4, 0xC6))
_LATER_WITH_PREFIX = {(0xF3, 0x12), (0xF2, 0x12), (0xF3, 0x16), (0xF3, 0xBD), (0xF3, 0xAE), (0xF3, 0xC7)}
"""(prefix, opcode) of SSE3 moves, LZCNT, FSGSBASE and RDPID. TZCNT (F3 BC) is not among them: compilers emit it for the
baseline where the operand is known not to be zero, and an older processor runs it as BSF with the same result."""


class _Beyond(Exception):
    """The instruction at hand is not a baseline instruction."""


def beyond_baseline(code: bytes) -> Iterator[str]:
    """Yield a sentence for the first instruction of `code` that the x86-64 baseline lacks; nothing when there is
    none."""
    at = 0
    while at < len(code):
        try:
            at += _length(code[at : at + 16])
        except _Beyond as reason:
            yield f"{reason} at offset {at:#x}: {code[at : at + 12].hex(' ')}"
            return
    if at > len(code):
        yield "the last instruction is cut off"


def _length(window: bytes) -> int:
    """Return the bytes of the instruction that the window starts with."""
    code = window + bytes(16)
    at = 0
    prefixes = set()
    while code[at] in _LEGACY and at < 14:
        prefixes.add(code[at])
        at += 1
    wide = False
    if code[at] & 0xF0 == 0x40:
        wide = bool(code[at] & 8)
        at += 1
    opcode = code[at]
    at += 1
    word = 2 if 0x66 in prefixes and not wide else 4
    if opcode == 0x0F:
        return at + 1 + _two_byte(code[at], code[at + 1 :], prefixes, wide)
    if opcode in (0xC4, 0xC5, 0x62):
        raise _Beyond("an AVX or later instruction")
    if opcode == 0x8F and code[at] & 0x38:
        raise _Beyond("an XOP instruction")
    return at + _one_byte(opcode, code[at:], wide, word, 0x67 in prefixes)


def _one_byte(opcode: int, rest: bytes, wide: bool, word: int, short_address: bool) -> int:
    if 0xB8 <= opcode <= 0xBF:
        return 8 if wide else word
    if 0xA0 <= opcode <= 0xA3:
        return 4 if short_address else 8
    if opcode in (0xE8, 0xE9):
        return 4
    if opcode in (0xC2, 0xCA):
        return 2
    if opcode == 0xC8:
        return 3
    if not (opcode in _ONE_MODRM or opcode in _ONE_PLAIN or opcode in _ONE_BYTE or opcode in _ONE_WORD):
        raise _Beyond(f"an unknown opcode {opcode:02x}")
    size = _modrm(rest) if opcode in _ONE_MODRM else 0
    is_test = opcode in (0xF6, 0xF7) and rest[0] & 0x30 == 0
    if opcode in _ONE_BYTE or (is_test and opcode == 0xF6):
        size += 1
    elif opcode in _ONE_WORD or is_test:
        size += word
    return size


def _two_byte(opcode: int, rest: bytes, prefixes: set[int], wide: bool) -> int:
    if 0x80 <= opcode <= 0x8F:
        return 4
    if opcode in _TWO_PLAIN:
        return 0
    memory, extension = rest[0] < 0xC0, rest[0] >> 3 & 7
    is_later = any((prefix, opcode) in _LATER_WITH_PREFIX for prefix in prefixes)
    is_xsave = opcode == 0xAE and ((memory and extension in (4, 5, 6)) or (not memory and extension < 5))
    is_wide_exchange = opcode == 0xC7 and (wide or not memory or extension != 1)
    if opcode not in _TWO_MODRM or is_later or is_xsave or is_wide_exchange:
        raise _Beyond(f"an instruction later than the baseline (0f {opcode:02x})")
    return _modrm(rest) + (1 if opcode in _TWO_BYTE else 0)


def _modrm(rest: bytes) -> int:
    """Return the bytes of a ModRM byte with the SIB byte and displacement that it asks for."""
    mode, base = rest[0] >> 6, rest[0] & 7
    if mode == 3:
        return 1
    size = 1
    if base == 4:
        size += 1
        base = rest[1] & 7
    if mode == 0:
        return size + (4 if base == 5 else 0)
    return size + (1 if mode == 1 else 4)
