"""Machine code of a kernel of each family: through its operator, with races looked for, to the bits that PTX gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from shipped_kernels import BUILT
from tsmla.loading.manifest import images_of
from tsmla.loading.toolchain import shipped_libraries
from tsmla_emulator.prove import check, machine_code
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.machine import EmulationError, Options
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
