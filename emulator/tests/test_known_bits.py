"""Known bits of numbers: what an operation leaves known holds for all numbers that have them."""

from __future__ import annotations

import itertools
import random

from tsmla_emulator.prove.dataflow.known_bits import ALL, Known

OPERATIONS = {
    "+": lambda a, b: a + b,
    "*": lambda a, b: a * b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "<<": lambda a, _: a << 5,
    ">>": lambda a, _: a >> 5,
}


def test_bits_that_stay_known_are_those_of_every_number():
    draw = random.Random(1)
    told = dict.fromkeys(OPERATIONS, 0)
    for _ in range(300):
        a, b = (draw.getrandbits(32) for _ in range(2))
        known = [
            Known(~x & mask & ALL, x & mask) for x in (a, b) for mask in [draw.getrandbits(32) | draw.getrandbits(32)]
        ]
        for name, operation in OPERATIONS.items():
            found = operation(*known)
            told[name] += (found.zeros | found.ones).bit_count()
            for _ in range(5):
                x, y = (one.ones | draw.getrandbits(32) & ~(one.zeros | one.ones) for one in known)
                result = operation(x, y) & ALL
                assert not result & found.zeros and not found.ones & ~result, (name, known)
    assert min(told.values()) > 300, "some bits are known of each"


def test_numbers_are_known_whole():
    for (name, operation), x, y in itertools.product(OPERATIONS.items(), (0, 5, ALL), (0, 0x80000001)):
        assert operation(Known.number(x), Known.number(y)) == Known.number(operation(x, y) & ALL), name
