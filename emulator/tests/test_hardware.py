"""Shipped kernels in emulation leave what they left in the memory of an H200 (hardware_results)."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shipped_kernels import BUILT
from tsmla_emulator.prove import check
from tsmla_emulator.prove.hardware.memory import Recorded, digests_in, drawn_by_integers, in_emulator, keep, ran
from tsmla_emulator.run.emulate import Emulation
from tsmla_emulator.run.host.capture import extents
from tsmla_emulator.run.host.memory import merged
from tsmla_emulator.run.machine import Options

RECORDED = Recorded(Path(__file__).with_name("hardware_results"))
AT_BOUNDS = Recorded(Path(__file__).with_name("hardware_results") / "at_bounds")
"""What was left in the calls at bounds of 2026-11-29: digests alone."""
WITH_BYTES = "tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse"
"""The variant of whose results RECORDED has the bytes."""
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
    "tsmla_prefill_sm_90a_fp16_to_fp16_d128x128_causal_lse",
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
def test_memory_is_bit_for_bit_that_of_the_gpu_in_calls_at_bounds(symbol):
    _leaves_what_the_gpu_left(AT_BOUNDS, symbol)


def _leaves_what_the_gpu_left(recorded: Recorded, symbol: str) -> None:
    variant, options = check.find(symbol), Options(machine_code=True, hardware_sums=True)
    calls, wrong = ran(variant, in_emulator, options, BUILT, recorded.at_bounds)
    assert (symbol, wrong) == (symbol, "")
    assert [call.given for call in calls] == recorded.variants[symbol]["given"]
    assert (symbol, recorded.differences(variant, calls)) == (symbol, [])


@pytest.fixture
def halves(tmp_path):
    """What was recorded of prefills, as two processes would have: each of every other variant."""
    made, whole = [], RECORDED.files["prefill"]
    said = json.loads(str(whole["said"]))
    contents = {name: whole[name] for name in whole.files if name != "said"}
    for first in range(2):
        own = {symbol: said["variants"][symbol] for symbol in sorted(said["variants"])[first::2]}
        made.append(tmp_path / str(first))
        made[-1].mkdir()
        np.savez(made[-1] / "prefill.npz", said=json.dumps(said | {"variants": own}), **contents)
    return made


def test_records_of_several_processes_are_joined(halves, tmp_path):
    symbols = sorted(symbol for symbol in RECORDED.variants if symbol.startswith("tsmla_prefill"))
    keep(halves, tmp_path / "both", [WITH_BYTES])
    both = Recorded(tmp_path / "both")
    assert both.variants == {symbol: RECORDED.variants[symbol] for symbol in symbols}
    assert both.certificates < RECORDED.certificates and not both.at_bounds
    digests = {digest for left in both.variants[WITH_BYTES]["left"] for digest in left.values()}
    kept = {*both.files["prefill"].files} - {"said"}
    assert kept and kept == digests & {*RECORDED.files["prefill"].files}


def test_records_that_were_not_made_alike_are_not_joined(halves, tmp_path):
    with pytest.raises(ValueError, match="has variants that another one has, too: tsmla_prefill_sm_90a_"):
        keep([halves[0], *halves], tmp_path / "both", [])
    said = json.loads(str(np.load(halves[1] / "prefill.npz")["said"]))
    np.savez(halves[1] / "prefill.npz", said=json.dumps(said | {"certificate": "another GPU"}))
    with pytest.raises(ValueError, match="was made by other means than .*: another GPU"):
        keep(halves, tmp_path / "both", [])
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("hardware_sums", [True, False])
def test_what_the_gpu_left_is_right_by_the_sums_of_tensor_cores_alone(hardware_sums):
    """`check` judges the recorded results themselves."""
    variant = check.find(WITH_BYTES)
    left = iter(RECORDED.variants[WITH_BYTES]["left"])

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
