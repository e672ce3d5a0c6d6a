"""One row of facts is all that an architecture is: with another in the table, everything that lists them follows."""

from __future__ import annotations

import shutil
from pathlib import Path

from example_variants import run_python

ROOT = Path(__file__).resolve().parents[2]
ROW = """    SM120A = "sm_120a", dataclasses.replace(
        _HOPPER, gpus={"RTX 5090": 170}, prefill={Dtype.BF16: (Dtype.BF16,)}, decode=()
    )
"""
SCRIPT = """
import sys
sys.path[:0] = [{copy!r}, {tests!r}]
import build_aot.matrix  # from here on, tsmla is the copy beside it
import torch
from tsmla.identity.arch import Arch
from tsmla.identity.support import why_unsupported
from tsmla.identity.variant import Dtype, PrefillVariant
from tsmla.loading import gpu
from tsmla.operators import checks
import readme

torch.cuda.get_device_capability = lambda index: (12, 0)
print(sum(variant.arch == "sm_120a" for variant in build_aot.matrix.shipped(families=["prefill"])))
print(why_unsupported(PrefillVariant(Arch.SM120A, Dtype.E4M3, Dtype.BF16, 192, 128, True, True)))
print(checks.arch_of(torch.device("cuda", 0)))
gpu.capabilities = lambda: ([(12, 0)], "")
print(gpu.current_arch()[1])
print(readme.support_table().splitlines()[0])
print(readme.support_table().splitlines()[2])
"""


def test_a_made_up_architecture_is_one_row(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "build_aot", copy / "build_aot")
    shutil.copytree(ROOT / "python" / "tsmla", copy / "python" / "tsmla", ignore=shutil.ignore_patterns("objs"))
    (copy / "kernels").symlink_to(ROOT / "kernels")
    table = copy / "python" / "tsmla" / "identity" / "arch.py"
    before, last, after = table.read_text("utf-8").partition('    SM107A = "sm_107a"')
    table.write_text(before + ROW + last + after, "utf-8")
    done = run_python(SCRIPT.format(copy=str(copy), tests=str(ROOT / "tests")))
    assert done.stdout.splitlines() == [
        "15",
        "prefill for sm_120a takes bf16, not e4m3",
        "sm_120a",
        "GPU 0 runs sm_120a (RTX 5090)",
        "| operator | sm_90a (H100, H200) | sm_100a (B200, GB200) | sm_103a (B300, GB300) | sm_120a (RTX 5090) |",
        "| `tsmla_prefill`, bf16 in, bf16 out, head dims (192, 128), (128, 128), (256, 256) | yes | yes | yes | yes |",
    ], done.stderr
