"""What a kernel does that may be launched before the one in front of it has finished."""

from __future__ import annotations

import cutlass.cute as cute


def follow_predecessor() -> None:
    """Wait for the kernel in front of this one, and let the next one come.

    Every CTA must call this: then whoever waits for this kernel has waited for its predecessor, too. What is loaded
    behind it must come by plain loads: ld.global.nc is for memory that stays constant while the kernel exists."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
