"""What compiled kernels refuse by themselves: functions that check their arguments as a kernel does and launch nothing.

The compiler generates the checks from the kernel's own fake arguments, as it does for the kernel, with one difference:
the tensors are the CPU's, so that tests can pass theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

from cutlass import cute
from tsmla.identity.variant import Variant
from tsmla_kernels import entry


@functools.cache
def refusing(variant: Variant) -> Callable[..., None]:
    """A function with the parameters of a variant's kernel, that raises what the kernel would."""
    on_cpu = functools.partial(entry.make_fake_tensor, memspace=cute.AddressSpace.generic)
    with mock.patch.object(entry, "make_fake_tensor", on_cpu):
        *fakes, _stream = entry.fake_arguments(variant)
    return cute.compile(_nothing, *fakes, options="--enable-tvm-ffi")


@cute.jit
def _nothing(*_arguments):
    pass


class Recorder:
    """Stands for `resolve.kernel`: keeps the variants asked for and the arguments of each launch that no kernel would
    refuse."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.launches: list[tuple] = []

    def __call__(self, variant: Variant):
        def launch(*arguments) -> None:
            refusing(variant)(*arguments)
            self.launches.append(arguments)

        self.variants.append(variant)
        return launch
