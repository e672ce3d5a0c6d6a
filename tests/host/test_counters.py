"""Counters that ncu writes are read as the kernels of the candidate that ran, whatever it says between them."""

from __future__ import annotations

import pytest

from benchmarks import counters

SAID = """==PROF== Connected to process 7
==PROF== Profiling "attend": 0%....100% - 30 passes
"ID","Kernel Name","gpu__time_duration.sum","smsp__inst_executed.sum","device__attribute_warp_size"
"","","ns","inst",""
"0","at::cuda::spin_kernel(long)","2,016","128","32"
"1","attend","9,440","1,234,567","32"
"2","combine","4,000","n/a","32"
"3","at::cuda::spin_kernel(long)","2,016","128","32"
"4","flash","12,000","777","32"
""".splitlines()
LABELS = [["8x1x16", "bf16"], ["8x1x16", "FA3 gather"]]


def test_kernels_have_the_label_before_which_their_mark_stands():
    found = counters.read(SAID, LABELS)
    assert [(one["candidate"], one["kernel"]) for one in found] == [
        ("bf16", "attend"),
        ("bf16", "combine"),
        ("FA3 gather", "flash"),
    ]
    assert {one["shape"] for one in found} == {"8x1x16"}
    assert found[0]["gpu__time_duration.sum"] == 9440 and found[0]["smsp__inst_executed.sum"] == 1234567
    assert found[1]["smsp__inst_executed.sum"] is None and "device__attribute_warp_size" not in found[0]


@pytest.mark.parametrize("labels", [LABELS[:1], LABELS + LABELS[:1]], ids=["fewer", "more"])
def test_marks_that_are_not_those_of_the_labels_are_an_error(labels):
    with pytest.raises(SystemExit, match="of the"):
        counters.read(SAID, labels)
