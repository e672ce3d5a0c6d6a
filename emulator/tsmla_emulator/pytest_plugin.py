"""The fixture `gpu`: one kernel test for emulator and device.

    @pytest.mark.archs("sm_90a", "sm_100a")
    def test_pack(gpu):
        k = torch.randn(8, 2, 128, dtype=torch.bfloat16, device="cuda")
        ...

It runs once per architecture and schedule in emulation, or with `--gpu device` on the machine's GPU.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tsmla.identity.arch import SHIPPED_ARCHS, Arch

from .run.emulate import Emulation, emulated
from .run.machine import Options

if TYPE_CHECKING:
    from .run.host.compile import Compiled

SCHEDULES = {
    "eager": Options(),
    "late": Options(async_mode="late", quantum=0, seed=1),
    "random": Options(async_mode="random", quantum=0, seed=2, elect_highest=True),
    "races": Options(async_mode="late", quantum=0, seed=3, happens_before=True),
}


LIVE_OBJECTS = 100_000
"""Objects between two garbage collections: each kernel that was read is some 100,000 objects that stay."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU that a test runs on. `emulation` is None on a device."""

    arch: str
    emulation: Emulation | None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tsmla-emulator")
    group.addoption(
        "--gpu", choices=["emulated", "device"], default="emulated", help="where the fixture gpu runs tests"
    )
    group.addoption("--schedules", default="races", help=f"in emulation, of: {','.join(SCHEDULES)}")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist, which starts one worker per core
        torch.set_num_threads(1)
    gc.set_threshold(LIVE_OBJECTS)
    config.addinivalue_line("markers", "archs(*names): architectures that a test with the fixture gpu runs on")
    config.addinivalue_line("markers", "processors(count): SMs of the emulated GPU; default: as many as real ones have")
    config.addinivalue_line("markers", "lockstep(*archs): on these, the emulator takes lanes of a warp to go in step")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gpu" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("archs")
    archs = mark.args if mark else SHIPPED_ARCHS
    if metafunc.config.getoption("--gpu", "emulated") == "device":
        metafunc.parametrize("gpu", [archs], ids=["device"], indirect=True)
        return
    schedules = metafunc.config.getoption("--schedules", "races").split(",")
    if unknown := sorted(set(schedules) - set(SCHEDULES)):
        raise pytest.UsageError(f"--schedules has {', '.join(unknown)}; known: {', '.join(SCHEDULES)}")
    places = [(arch, name) for arch in archs for name in schedules]
    metafunc.parametrize("gpu", places, ids=[f"{arch}-{name}" for arch, name in places], indirect=True)


@pytest.fixture(scope="session")
def compiled_kernels() -> Callable[[Any], Compiled] | None:
    """Return where `gpu` takes the files of a tsmla variant from, as for `emulated`. To be overridden; None compiles
    them."""
    return None


@pytest.fixture
def gpu(request: pytest.FixtureRequest, compiled_kernels: Callable[[Any], Compiled] | None) -> Iterator[Gpu]:
    """Give torch a CUDA device 0: emulated, or real. Skips on a machine whose GPU is not one that the test is for."""
    if request.config.getoption("--gpu", "emulated") == "device":
        yield Gpu(_device_arch(request.param), None)
        return
    arch, schedule = request.param
    in_step = request.node.get_closest_marker("lockstep")
    options = dataclasses.replace(SCHEDULES[schedule], lockstep=in_step is not None and arch in in_step.args)
    processors = request.node.get_closest_marker("processors")
    count = processors.args[0] if processors else None
    with emulated(arch, options, compiled=compiled_kernels, processors=count) as emulation:
        yield Gpu(arch, emulation)


def _device_arch(accepted: tuple[str, ...]) -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; torch sees none")
    capability = torch.cuda.get_device_capability()
    found = Arch.from_capability(*capability)
    if found not in accepted:
        pytest.skip(f"the GPU is of compute capability {capability}; the test is for {', '.join(accepted)}")
    return found
