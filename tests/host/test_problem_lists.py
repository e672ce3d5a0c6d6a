"""Lists of chosen keys, which the self-test, the fuzzer, the emulator's check and the tests draw alike."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tsmla.problems.lists import NOWHERE, named_slots, random_lists, union_of


@given(
    st.integers(0, 4), st.integers(0, 40), st.tuples(st.integers(0, 5), st.integers(1, 9)), st.floats(0, 1),
    st.integers(0, 5), st.integers(0, 50), st.integers(0, 2**31),
)  # fmt: skip
def test_indices_name_keys_or_nothing(lists, top_k, cache, outside, front, distinct, seed):
    drawn = random_lists(
        lists, top_k, cache, outside=outside, front=front, distinct=distinct,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    slots = cache[0] * cache[1]
    most = min(slots, distinct or slots)
    assert drawn.shape == (lists, top_k)
    for number, index in enumerate(drawn.flatten().tolist()):
        strays = (*NOWHERE, slots, slots + cache[1])
        assert index in strays or (0 <= index < max(1, most) and number % top_k >= front)


def test_shares_are_as_asked():
    torch.manual_seed(0)
    for outside in (0.0, 0.2, 1.0):
        drawn = random_lists(10, 1000, (100, 64), outside=outside, front=10)
        stray = (drawn < 0) | (drawn >= 6400)
        assert stray[:, :10].all() and abs(stray[:, 10:].float().mean() - outside) < 0.02
        assert outside == 1 or len(drawn[~stray].unique()) > 0.5 * min(6400, int((~stray).sum()))


@given(
    st.lists(st.lists(st.integers(-3, 12), min_size=5, max_size=5), max_size=4), st.integers(0, 10), st.data()
)  # fmt: skip
def test_a_list_names_what_stands_in_it(indices, slots, data):
    count = st.integers(-(2**63), 2**63 - 1) | st.integers(-4, 5)
    lengths = data.draw(st.none() | st.lists(count, min_size=len(indices), max_size=len(indices)))
    got = named_slots(torch.tensor(indices, dtype=torch.int32).reshape(len(indices), 5), slots, lengths)
    want = [
        [index for index in own[: max(0, count)] if 0 <= index < slots]
        for own, count in zip(indices, lengths or [5] * len(indices), strict=True)
    ]
    assert [own.tolist() for own in got] == want
    assert union_of(got).tolist() == sorted({slot for own in want for slot in own})
