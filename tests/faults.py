"""What can happen to a file: bits that flip, parts that are lost or exchanged, another content in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

BLOCK = 512
"""Bytes that a disk loses at once."""


def flip(content: bytes, chance: Random) -> bytes:
    return flip_within(content, 0, len(content), chance)


def flip_in_header(content: bytes, chance: Random) -> bytes:
    return flip_within(content, 0, min(1024, len(content)), chance)


def flip_at_the_end(content: bytes, chance: Random) -> bytes:
    return flip_within(content, max(0, len(content) - 4096), len(content), chance)


def flip_some(content: bytes, chance: Random) -> bytes:
    for _ in range(chance.randint(2, 40)):
        content = flip(content, chance)
    return content


def cut(content: bytes, chance: Random) -> bytes:
    return content[: chance.randrange(len(content))]


def add(content: bytes, chance: Random) -> bytes:
    return content + chance.randbytes(chance.randint(1, 2 * BLOCK))


def lose_a_block(content: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes(len(content[at : at + BLOCK])) + content[at + BLOCK :]


def leave_out_a_block(content: bytes, chance: Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + content[at + chance.randint(1, BLOCK) :]


def exchange_blocks(content: bytes, chance: Random) -> bytes:
    first, second = sorted(chance.sample(range(len(content) + 1), 2))
    return content[second:] + content[first:second] + content[:first]


def replace(content: bytes, chance: Random) -> bytes:
    return chance.choice([b"", b"\0", b"not what it was\n", bytes(len(content)), chance.randbytes(len(content))])


FAULTS: tuple[Callable[[bytes, Random], bytes], ...] = (
    flip, flip_in_header, flip_at_the_end, flip_some, cut, add, lose_a_block, leave_out_a_block, exchange_blocks,
    replace,
)  # fmt: skip


def struck(content: bytes, chance: Random) -> tuple[str, bytes]:
    """The name of a fault, and what it made of the content; never the content itself."""
    while True:
        fault = chance.choice(FAULTS)
        changed = fault(content, chance)
        if changed != content:
            return fault.__name__, changed


def flip_within(content: bytes, start: int, end: int, chance: Random) -> bytes:
    if start == end:
        return content
    at = chance.randrange(start, end)
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def edited(text: str, chance: Random) -> str:
    """A JSON text of which one value, at any depth, is another, is gone, or has company."""
    whole = json.loads(text)
    nodes = [[whole]]
    for node in nodes:
        for inner in node.values() if isinstance(node, dict) else node:
            if isinstance(inner, dict | list):
                nodes.append(inner)
    node: Any = chance.choice([found for found in nodes if found])
    key = chance.choice(list(node)) if isinstance(node, dict) else chance.randrange(len(node))
    values = [None, True, -1, 0, 2**70, 1.5, "", "x", "../x", "\0", "\ud800", "9" * 5000, [], {}, [[]], {"x": {}}]
    match chance.randrange(4):
        case 0 if len(node) > 1 or node is not nodes[0]:
            del node[key]
        case 1 if isinstance(node, dict):
            node[chance.choice(["x", "", "schema", "file"])] = chance.choice(values)
        case 2 if isinstance(node, list) and node is not nodes[0]:
            node.append(chance.choice([*values, node[key]]))
        case _:
            node[key] = chance.choice(values)
    return json.dumps(nodes[0][0])
