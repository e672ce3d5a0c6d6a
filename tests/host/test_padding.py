"""Padded batches as sequences of a prefill: against masked attention, for padding anywhere."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_attention import prefill
from tsmla.integrations.shared import padding

HEADS = 2


def masked(query, key, value, allowed: torch.Tensor) -> torch.Tensor:
    """[batch, length, heads, 128] of attention where `allowed` [batch, length_q, length_kv] says; 0 without keys."""
    scores = (query.double() @ key.double().mT) * 0.1
    scores = scores.masked_fill(~allowed[:, None], -math.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value.double()).transpose(1, 2)


def attend(sequences: padding.Sequences, query, key, value) -> torch.Tensor:
    packed = padding.packed(query, sequences.order_q)
    keys, values = (padding.packed(x, sequences.order_kv) for x in (key, value))
    out = prefill(
        packed,
        keys,
        values,
        cum_seq_lens=sequences.ends_kv,
        cum_seq_lens_q=sequences.ends_q,
        batch_size=sequences.count,
        softmax_scale=0.1,
        is_causal=sequences.causal,
        seq_lens=None,
        max_seq_len=1,
    )
    return padding.unpacked(out, len(query), sequences.order_q)


def tensors(batch: int, length_q: int, length_kv: int) -> list[torch.Tensor]:
    shapes = ((length_q, 192), (length_kv, 192), (length_kv, 128))
    return [torch.randn(batch, HEADS, *shape, dtype=torch.float64) for shape in shapes]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), batch=st.integers(1, 4), length_kv=st.integers(1, 12), causal=st.booleans())
def test_padding_anywhere(data, batch, length_kv, causal) -> None:
    length_q = data.draw(st.integers(1, length_kv))
    row = st.lists(st.booleans(), min_size=length_kv, max_size=length_kv)
    valid = torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    query, key, value = tensors(batch, length_q, length_kv)
    tokens = valid[:, length_kv - length_q :] if causal else None
    allowed = valid[:, None, :].expand(-1, length_q, -1)
    if causal:
        allowed = allowed & torch.ones(length_q, length_kv, dtype=torch.bool).tril(length_kv - length_q)
        allowed = allowed & tokens[..., None]
    got = attend(padding.padded(tokens, valid, length_q, causal), query, key, value)
    assert torch.allclose(got, masked(query, key, value, allowed), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_a_batch_without_padding(causal) -> None:
    query, key, value = tensors(3, 4, 9)
    allowed = torch.ones(3, 4, 9, dtype=torch.bool)
    expected = masked(query, key, value, allowed.tril(5) if causal else allowed)
    got = attend(padding.whole(3, 4, 9, causal, "cpu"), query, key, value)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)


def test_keys_that_a_cache_has_no_tokens_for_yet() -> None:
    query, key, value = tensors(2, 3, 10)
    key[:, :, 7:] = math.nan
    value[:, :, 7:] = math.nan
    keys = (torch.arange(10) < 7).expand(2, -1)
    sequences = padding.padded(None, keys, 3, True, in_order=True)
    assert sequences.order_kv is None and sequences.order_q is None
    allowed = torch.ones(2, 3, 7, dtype=torch.bool).tril(4)
    expected = masked(query, key[:, :, :7], value[:, :, :7], allowed)
    assert torch.allclose(attend(sequences, query, key, value), expected, rtol=0, atol=1e-12)


def test_a_batch_of_one_is_not_copied() -> None:
    query = torch.randn(1, 2, 5, 192)
    assert padding.packed(query, None).data_ptr() == query.data_ptr()
    strided = torch.randn(3, 5, 2, 256).transpose(1, 2)[..., :128]  # as a projection gives values
    assert padding.packed(strided, None).data_ptr() == strided.data_ptr()


def test_sequences_move_to_devices() -> None:
    sequences = padding.padded(None, torch.ones(2, 3, dtype=torch.bool), 1, False).to(torch.device("meta"))
    assert sequences.ends_q.is_meta and sequences.ends_kv.is_meta and sequences.order_kv.is_meta
    assert sequences.order_q is None and sequences.causal is False and sequences.count == 6
