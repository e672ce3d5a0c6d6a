"""Calls that the timing model predicts and benchmarks measure: their kernels are there, under these names."""

from __future__ import annotations

from tsmla_emulator.prove import check
from tsmla_emulator.time import peers

from benchmarks import predict_peers
from benchmarks.clock_cases import CASES, PEER_CASES


def test_cases_name_kernels_that_are_there():
    assert all(check.find(case.symbol).symbol() == case.symbol for case in CASES)
    known = peers.peers()
    for case in PEER_CASES:
        peer = known[case.symbol]
        assert (case.package, case.dims, case.causal) == (peer.package.name, peer.dims, peer.causal)
    assert len({case.name for case in (*CASES, *PEER_CASES)}) == len(CASES) + len(PEER_CASES)


def test_what_is_published_is_a_time_or_a_rate_of_a_kernel_that_is_there():
    for one in predict_peers._published():
        assert one.symbol in peers.peers() and (one.us is None) != (one.tflops is None)
    for machine, arch in predict_peers.OF_MACHINE.items():
        symbol = predict_peers.TOKENSPEED.format("decode", arch, "e4m3", "512x64")
        assert machine in predict_peers.MACHINES and symbol in peers.peers()
