"""Where the ring of tasks lies in shared memory. Pure Python."""

from __future__ import annotations

DEALT_AT = 384
"""Bytes, behind the barriers, where the tasks lie."""
TASK_RING = 4
"""Tasks that are told ahead."""
TASK_WORDS = 12
"""32-bit words of a task, in whole vectors of four."""
