"""What tsmla_decode must compute, in float64, and how close a kernel has to come."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sight:
    """The scalars that decide which keys a query token sees, as tsmla_decode takes them."""

    causal: bool = True
    window_left: int = -1
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1

    def position(self, key: int) -> int:
        """The global position of a key of this rank's cache."""
        block, within = divmod(key, self.cp_interleave)
        return (block * self.cp_world + self.cp_rank) * self.cp_interleave + within

    def keys(self, seq_len: int, causal_seq: int, visible: int, q_len: int, token: int) -> range:
        """The keys that query token `token` sees, by asking each key."""
        bound = causal_seq - (q_len - 1 - token if self.causal else 0)
        lowest = 0 if self.window_left < 0 else bound - 1 - self.window_left
        seen = [key for key in range(min(seq_len, visible)) if lowest <= self.position(key) < bound]
        keys = range(seen[0], seen[-1] + 1) if seen else range(0)
        assert len(keys) == len(seen)
        return keys
