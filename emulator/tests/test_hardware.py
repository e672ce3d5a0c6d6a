"""Shipped kernels in emulation leave what they left in the memory of an H200 (hardware_results)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from shipped_kernels import BUILT
from tsmla_emulator.prove import check
from tsmla_emulator.prove.hardware.memory import Recorded, digests_in, drawn_by_integers, in_emulator, ran
from tsmla_emulator.run.emulate import Emulation
from tsmla_emulator.run.host.capture import extents
from tsmla_emulator.run.host.memory import merged
from tsmla_emulator.run.machine import Options

RECORDED = Recorded(Path(__file__).with_name("hardware_results"))
AT_BOUNDS = Recorded(Path(__file__).with_name("hardware_results") / "at_bounds")
"""What was left in the calls that mutants are tried with: digests alone."""
UNCHANGED = (
    "tsmla_decode_sm_90a_bf16_to_bf16_d512x64_lse",
    "tsmla_decode_sm_90a_e4m3_to_bf16_d512x64_lse",
    "tsmla_key_mask_sm_90a",
    "tsmla_pack_sm_90a_bf16_to_e4m3_d128x64x128",
    "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse",
    "tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse",
    "tsmla_quantize_q_sm_90a_bf16_d512e4m3s512apartwholex64",
    "tsmla_read_cache_sm_90a_bf16_d512e4m3s128x64",
    "tsmla_write_cache_sm_90a_bf16_d512e4m3s128x64",
)
"""Kernels of each family whose machine code is what was recorded. Who changes one records it anew."""
FEW_AT_BOUNDS = (
    "tsmla_decode_sm_90a_fp16_to_fp16_d512x64_gathers_lse",
    "tsmla_key_mask_sm_90a",
    "tsmla_pack_sm_90a_bf16_to_e4m3_d128x64x128",
    "tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse",
    "tsmla_quantize_q_sm_90a_bf16_d512e4m3s512apartwholex64",
    "tsmla_read_cache_sm_90a_bf16_d512e4m3s128x64",
    "tsmla_write_cache_sm_90a_bf16_d512e4m3s128x64",
)
"""One of each family, of those whose calls at bounds take seconds. `compare` compares all."""


def test_all_variants_are_recorded():
    assert len(RECORDED.variants) == 113
    assert AT_BOUNDS.variants.keys() == RECORDED.variants.keys()
    assert AT_BOUNDS.at_bounds and not RECORDED.at_bounds


def test_inputs_are_drawn_from_integers():
    with drawn_by_integers():
        numbers = torch.randn(3, 2), torch.randint(0, 100, (4,)), torch.randperm(5)
    assert [x.dtype for x in numbers] == [torch.float32, torch.int64, torch.int64]
    with drawn_by_integers():
        assert torch.equal(torch.randn(3, 2), numbers[0])


@pytest.mark.parametrize("family", RECORDED.files)
def test_memory_is_bit_for_bit_that_of_the_gpu(family):
    """Kernels that have other machine code since are left out."""
    compared, of_family = [], f"tsmla_{family}_sm_90a"
    for symbol in filter(lambda symbol: symbol.startswith(of_family), RECORDED.variants):
        if digests_in(BUILT(check.find(symbol)).library) == RECORDED.variants[symbol]["code"]:
            _leaves_what_the_gpu_left(RECORDED, symbol)
            compared.append(symbol)
    assert {symbol for symbol in UNCHANGED if symbol.startswith(of_family)} <= {*compared}


@pytest.mark.parametrize("symbol", FEW_AT_BOUNDS)
def test_memory_is_bit_for_bit_that_of_the_gpu_in_the_calls_of_mutants(symbol):
    _leaves_what_the_gpu_left(AT_BOUNDS, symbol)


def _leaves_what_the_gpu_left(recorded: Recorded, symbol: str) -> None:
    variant, options = check.find(symbol), Options(machine_code=True, hardware_sums=True)
    calls, wrong = ran(variant, in_emulator, options, BUILT, recorded.at_bounds)
    assert (symbol, wrong) == (symbol, "")
    assert [call.given for call in calls] == recorded.variants[symbol]["given"]
    assert (symbol, recorded.differences(variant, calls)) == (symbol, [])


@pytest.mark.parametrize("hardware_sums", [True, False])
def test_what_the_gpu_left_is_right_by_the_sums_of_tensor_cores_alone(hardware_sums):
    """`check` judges the recorded results themselves."""
    symbol = "tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse"
    variant = check.find(symbol)
    left = iter(RECORDED.variants[symbol]["left"])

    def replayed(emulation: Emulation, wanted: Any) -> Any:
        _, names = in_emulator(emulation, wanted)

        def run(*arguments: Any) -> None:
            digests = next(left)
            for region in merged(extents(arguments, names, ("out", "lse").__contains__)):
                if region.writable:
                    content = RECORDED.content(variant, digests[region.name])
                    ctypes.memmove(region.start, content.tobytes(), len(content))

        return run, names

    _, wrong = ran(variant, replayed, Options(hardware_sums=hardware_sums), BUILT)
    assert ("LSE is off" in wrong) != hardware_sums
