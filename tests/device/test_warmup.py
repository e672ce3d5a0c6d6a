"""tsmla.warmup on a GPU: every kernel that its libraries have launches."""

from __future__ import annotations

import torch
import tsmla
from tsmla.loading import manifest, toolchain


def test_every_shipped_kernel_of_this_gpu_launches(arch):
    libraries = [record.manifest for record in manifest.read_directory(toolchain.shipped_libraries()).libraries]
    variants = [kernel.variant for library in libraries if library.arch == arch for kernel in library.kernels]
    assert variants and set(tsmla.warmup(variants)) == {*variants}
    torch.cuda.synchronize()
