"""How kernels are launched, and what those do that may begin before the one in front of them has finished."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


def launch(kernel, given, ctas: Int32, threads: int, shared_bytes: int, cluster: int | None = None) -> None:
    """Launch a kernel, which has been given its arguments, with one CTA on an SM at a time. given: what the call's
    table lists, by name. cluster: CTAs that work together."""
    kernel.launch(
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster else None,
        smem=shared_bytes,
        stream=given.stream,
        min_blocks_per_mp=1,
        use_pdl=given.pdl,
    )


def follow_predecessor() -> None:
    """Wait for the kernel in front of this one, and let the next one come.

    Every CTA must call this: then whoever waits for this kernel has waited for its predecessor, too. What is loaded
    behind it must come by plain loads: ld.global.nc is for memory that stays constant while the kernel exists."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
