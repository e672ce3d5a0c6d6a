"""The timing model's CTAs of a prefill are those that its kernel launches, and several query tiles of one cost less."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import tsmla
from shipped_kernels import BUILT
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla_emulator.prove import check
from tsmla_emulator.run import machine
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.machine import Report
from tsmla_emulator.time import prefill_grid, problem
from tsmla_emulator.time.machines import H100

EIGHT_BITS = check.find("tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse")
SIXTEEN_BITS = check.find("tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse")


def launched(variant, shape: problem.Shape, processors: int, monkeypatch) -> int:
    """CTAs that a call launches on a GPU of so many SMs, which runs nothing."""
    seen = []

    def note(module, launches, regions, options):
        seen.extend(launches)
        return Report()

    monkeypatch.setattr(machine, "run_launches", note)
    with emulated("sm_90a", compiled=BUILT, processors=processors):
        q, k, v = (
            torch.zeros(tokens, shape.heads, dim, device="cuda", dtype=TORCH_DTYPE_OF[variant.dtype])
            for tokens, dim in ((shape.queries, 192), (shape.keys, 192), (shape.keys, 128))
        )
        ends = [torch.tensor([0, end], dtype=torch.int32, device="cuda") for end in (shape.keys, shape.queries)]
        tsmla.tsmla_prefill(q, k, v, None, ends[0], shape.keys, 1, 0.1, True, True, ends[1], shape.queries)
    return seen[0].grid[0]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "processors", "eight_bits", "sixteen_bits"),
    [
        (130, 130, 2, 1, {1}, {2}),  # fewer rows than a tile has
        (1000, 4096, 3, 1, {1, 8}, {1, 3, 8}),
        (1000, 4097, 3, 1, {1, 4}, {1, 3, 8}),  # of 8 bits, tiles that follow each other
        (4097, 4097, 1, 1, {1, 2, 8}, {1, 7, 8}),
        (1500, 1500, 3, 3, {1, 8}, {1, 6, 8}),
        (570, 1000, 3, 1, {1, 4}, {1, 7}),
        (400, 60000, 3, 1, {1, 2}, {1}),  # of four tiles that follow each other, keys would leave L2
        (400, 90000, 3, 1, {1}, {1}),
        (400, 8192, 3, 1, {1, 4}, {6}),
        (400, 8193, 3, 1, {1, 4}, {1}),
    ],
)
def test_as_many_ctas_as_are_launched(monkeypatch, queries, keys, heads, processors, eight_bits, sixteen_bits):
    shape = problem.Shape(1, queries, keys, heads)
    for variant, some in ((EIGHT_BITS, eight_bits), (SIXTEEN_BITS, sixteen_bits)):
        rows = prefill_grid.rows_of_tile(variant)
        ctas = prefill_grid.kv_tiles(variant, shape, processors, rows, prefill_grid.keys_of_tile(variant))
        assert len(ctas) == launched(variant, shape, processors, monkeypatch)
        assert {len(own) for own in ctas} == some
        assert sum(map(len, ctas)) == heads * -(-queries // rows)


def test_a_head_s_longest_tile_stands_beside_its_shortest():
    (first, second, *alone) = prefill_grid.kv_tiles(EIGHT_BITS, problem.Shape(1, 640, 9600, 3), 1, 192, 96)
    assert first == second == [100, 96, 100, 98] and alone == [[96], [98], [100], [100]]  # short: the last of four


def test_tiles_of_16_bits_are_far_apart():
    """Heads have five tiles: 5 1 4 2 3, then 1 5 2 4 3, and the third, of which one is alone, 5 4 3 2 1. Each second
    of a CTA is the neighbour's."""
    ctas = prefill_grid.kv_tiles(SIXTEEN_BITS, problem.Shape(1, 640, 640, 3), 1, 128, 128)
    assert ctas == [[5, 2, 3, 2, 4, 4, 3], [1, 4, 1, 5, 3, 5, 2], [1]]


def test_a_further_query_tile_costs_less_than_a_cta():
    found = problem.PrefillTraced(EIGHT_BITS, problem.Shape(1, 2048, 2048, 128), 132, BUILT)
    modelled = found.model(H100)
    details = modelled.details
    assert 0 < details["beside tiles, a further query tile"] < 0.8 * details["beside tiles, a CTA"]
    assert details["CTAs"] == len(found.tiles()) < 2048 // 128 * 128


def test_no_compiler_is_asked_for():
    """Hunts of mutants ask for the sizes of prefills on machines that have none."""
    blind = "import sys; sys.modules['cutlass'] = None; import tsmla_emulator.time.prefill_grid"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", blind], env=environment, check=True)
