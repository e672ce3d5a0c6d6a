"""Machine code of a kernel of each family: through its operator, with races looked for, to the bits that PTX gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from shipped_kernels import BUILT
from tsmla.loading.manifest import images_of
from tsmla.loading.toolchain import shipped_libraries
from tsmla_emulator.prove import check, machine_code
from tsmla_emulator.prove.machine_code import order_differs
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.machine import EmulationError, Options, Trace
from tsmla_emulator.run.sass import program
from tsmla_emulator.run.sass.code import UnknownInstruction
from tsmla_emulator.run.sass.image import extracted
from tsmla_emulator.run.sass.kernel import kernels
from tsmla_emulator.run.sass.model import ALWAYS_DONE, Instruction

RACES = Options(async_mode="late", happens_before=True)
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
FAMILIES = (
    "tsmla_pack_{}_bf16_to_e4m3_d128x64x128",
    "tsmla_write_cache_{}_bf16_d512e4m3s128x64",
    "tsmla_read_cache_{}_bf16_d512e4m3s512apartwholex64",
    "tsmla_quantize_q_{}_bf16_d512e4m3s512apartwholex64",
    "tsmla_key_mask_{}",
)
EQUAL = (
    *(family.format(architecture) for architecture in ARCHITECTURES for family in FAMILIES),
    "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_full_nolse",
    "tsmla_prefill_sm_103a_e4m3_to_bf16_d192x128_full_nolse",
    "tsmla_decode_sm_90a_bf16_to_bf16_d512e4m3s128x64_lse",
)
CONTRACTED = (
    "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse",
    "tsmla_decode_sm_100a_e4m3_to_bf16_d512x64_lse",
    "tsmla_decode_sm_103a_e4m3_to_bf16_d512x64_lse",
)
"""ptxas makes multiply-adds of products and sums in these."""


@pytest.mark.parametrize("symbol", [*EQUAL, *CONTRACTED])
def test_machine_code_writes_what_ptx_does(symbol: str):
    found = machine_code.compare(check.find(symbol), RACES, BUILT)
    assert found.machine_code.error is None
    assert bool(found.differs) == (symbol in CONTRACTED), found.differs
    assert found.only_contracted == (symbol in CONTRACTED)
    assert found.order == ()


def trace(*notes: tuple[int, ...], warp: int = 0) -> Trace:
    rows = [(at, *note, 0, 0) for at, note in enumerate(notes)]
    return Trace("k", 0, 0, 0, warp, np.zeros(0, np.uint32), np.array(rows, np.uint32).reshape(-1, 6))


def test_one_command_compares_variants(monkeypatch, capsys):
    def told(*given: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["machine_code", *given])
        return machine_code.main(), capsys.readouterr().out

    status, text = told("tsmla_key_mask_sm_90*")
    assert status == 0 and "tsmla_key_mask_sm_90a: equal (" in text and "1 variants: 1 equal;" in text
    assert told("nothing")[0] == 1
    monkeypatch.setattr(machine_code, "order_differs", lambda one, other: ["warp 0: step 0"])
    status, text = told("tsmla_key_mask_sm_90a")
    assert status == 1 and "tsmla_key_mask_sm_90a: wrong (" in text and "call 0: warp 0: step 0" in text


def test_the_order_of_synchronisation_is_compared():
    arrive, wait, of_the_system = (1, 0x408, 1), (2, 0x408, 0), (2, 0x1000058, 0)
    assert [*order_differs([trace(arrive, wait)], [trace(of_the_system, arrive, wait)])] == []
    for other in (trace(wait, arrive), trace(arrive), trace(arrive, wait, wait), trace(arrive, (2, 0x410, 0))):
        (found,) = order_differs([trace(arrive, wait)], [other])
        assert found.startswith("launch 0, cluster 0, CTA 0, warp 0: step ")
    assert len([*order_differs([trace(arrive)], [trace(arrive), trace(wait, warp=1)])]) == 1


def test_copies_are_told_apart_by_what_they_read():
    def copies(*sources: int) -> Trace:
        rows = [(at, 3, 0x408, 64, source, 0) for at, source in enumerate(sources)]
        return Trace("k", 0, 0, 0, 0, np.zeros(0, np.uint32), np.array(rows, np.uint32))

    assert [*order_differs([copies(7, 8, 7)], [copies(107, 9, 107)])] == []
    assert [*order_differs([copies(7, 8, 7)], [copies(107, 9, 9)])] != []


PREFILL = "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse"


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[Instruction], Instruction]) -> None:
    """Have machine code run with instructions changed."""
    decoded = program.decoded
    monkeypatch.setattr(program, "decoded", lambda code, arch: [*map(change, decoded(code, arch))])
    program.machine_code_module.cache_clear()


@pytest.fixture(autouse=True)
def as_it_is():
    yield
    program.machine_code_module.cache_clear()


def test_a_wait_for_products_that_is_taken_away_is_noticed(monkeypatch):
    def without(instruction: Instruction) -> Instruction:
        if instruction.name != "WARPGROUP.DEPBAR.LE":
            return instruction
        return dataclasses.replace(instruction, guard=ALWAYS_DONE, opcode="NOP", modifiers=(), operands=())

    changed(monkeypatch, without)
    with pytest.raises(EmulationError, match="a register that a wgmma uses is written before .* has waited") as caught:
        check.check(check.find(PREFILL), dataclasses.replace(RACES, machine_code=True), compiled=BUILT)
    assert caught.value.kind == "race" and ", machine code 0x" in str(caught.value)
    verdict = check.check(check.find(PREFILL), Options(machine_code=True), compiled=BUILT)
    assert verdict.error is not None, "sums that have not landed are NaN"


def test_an_opcode_that_is_not_known_stops_the_kernel_before_it_runs(monkeypatch):
    changed(monkeypatch, lambda i: dataclasses.replace(i, opcode="FROB") if i.opcode == "MUFU" else i)
    with pytest.raises(UnknownInstruction, match=r"not implemented: .*FROB\.\w+ .* at 0x[0-9a-f]{4} of the machine"):
        check.check(check.find(PREFILL), Options(machine_code=True), compiled=BUILT)


def test_machine_code_of_an_installed_library_is_run(tmp_path):
    variant, other = check.find(EQUAL[0]), check.find(EQUAL[1])
    library, number = images_of(shipped_libraries())[variant]
    image = extracted(library, number, tmp_path / "image")
    made = dataclasses.replace(BUILT(variant), machine_code=image)
    assert check.check(variant, Options(machine_code=True), compiled=lambda _: made).error is None
    made = dataclasses.replace(made, machine_code=BUILT(other).library)
    with pytest.raises(ValueError, match="has no machine code of kernel_.*: it is of other sources"):
        check.check(variant, Options(machine_code=True), compiled=lambda _: made)


def test_ptx_alone_and_changed_ptx_have_no_machine_code():
    options = Options(machine_code=True)
    with emulated("sm_90a", options) as gpu, pytest.raises(ValueError, match="PTX alone has no machine code"):
        gpu.launch(".version 8.8\n.target sm_90a\n", "k", (1,), (32,), [])
    with emulated("sm_90a", options, rewrite=lambda module: module, compiled=BUILT) as gpu:
        with pytest.raises(ValueError, match="rewrite changes PTX"):
            gpu.kernel(check.find(PREFILL))


def test_a_library_says_what_the_host_code_has_to_know():
    compiled = BUILT(check.find(PREFILL))
    for kernel in kernels(compiled.library).values():
        assert kernel.architecture == "sm_90a" and kernel.threads == (384, 1, 1) and kernel.first_parameter == 0x210
        assert kernel.parameters[0] == (0x30, 128)  # a tensor map, at a multiple of 64 of the bank
        assert sum(kernel.parameters[-1]) == kernel.parameter_bytes
