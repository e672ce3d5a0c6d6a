"""Bits of a number of 32 bits that are known, whatever the rest is."""

from __future__ import annotations

from typing import NamedTuple

ALL = 0xFFFFFFFF


class Known(NamedTuple):
    """zeros, ones: masks of the bits that are known to be 0, and to be 1."""

    zeros: int
    ones: int

    @classmethod
    def number(cls, value: int) -> Known:
        return cls(~value & ALL, value & ALL)

    @property
    def is_whole(self) -> bool:
        """Whether all bits are known."""
        return self.zeros | self.ones == ALL

    def __add__(self, other: object) -> Known:
        """A sum's bit is known where both numbers' are and no carry into it, or a carry in any case."""
        assert isinstance(other, Known)
        least, most = self.ones + other.ones, (~self.zeros & ALL) + (~other.zeros & ALL)
        no_carry = ~(most ^ self.zeros ^ other.zeros) & ALL
        known = (self.zeros | self.ones) & (other.zeros | other.ones) & (no_carry | least ^ self.ones ^ other.ones)
        return Known(~most & known & ALL, least & known & ALL)

    def __mul__(self, other: object) -> Known:
        """A product ends with as many zeros as both numbers together."""
        assert isinstance(other, Known)
        if self.is_whole and other.is_whole:
            return Known.number(self.ones * other.ones)
        return NOTHING << min(self.last_zeros + other.last_zeros, 32)

    @property
    def last_zeros(self) -> int:
        """How many of the last bits are known to be 0."""
        others = ~self.zeros & ALL
        return (others & -others).bit_length() - 1 if others else 32

    def __lshift__(self, count: int) -> Known:
        return Known((self.zeros << count | (1 << count) - 1) & ALL, self.ones << count & ALL)

    def __rshift__(self, count: int) -> Known:
        return Known((self.zeros | ~ALL) >> count & ALL, self.ones >> count)

    def __and__(self, other: Known) -> Known:
        return Known(self.zeros | other.zeros, self.ones & other.ones)

    def __or__(self, other: Known) -> Known:
        return Known(self.zeros & other.zeros, self.ones | other.ones)


NOTHING = Known(0, 0)
