"""What compiled kernels refuse by themselves: functions that check their arguments as a kernel does and launch nothing.

The compiler generates the checks from the kernel's own fake arguments, as it does for the kernel, with one difference:
the tensors are the CPU's, so that tests can pass theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

from cutlass import cute
from tsmla.variant import Variant
from tsmla_kernels import registry
from tsmla_kernels.decode import arguments
from tsmla_kernels.sm90 import prefill


@functools.cache
def refusing(variant: Variant) -> Callable[..., None]:
    """A function with the parameters of a decode's or an sm_90a prefill's kernel, that raises what the kernel would."""
    on_cpu = functools.partial(arguments.make_fake_tensor, memspace=cute.AddressSpace.generic)
    with mock.patch.multiple(arguments, make_fake_tensor=on_cpu), mock.patch.multiple(prefill, make_fake_tensor=on_cpu):
        *fakes, _stream = registry.recipe(variant).arguments
    return cute.compile(_nothing, *fakes, options="--enable-tvm-ffi")


@cute.jit
def _nothing(*_arguments):
    pass
