"""The prefill by tsmla."""

from tsmla import tsmla_prefill


def run(query, key, value, cum_seq_lens_q, cum_seq_lens, softmax_scale):
    """Return the output and the natural LSE. No sequence is longer than all of them."""
    return tsmla_prefill(
        query,
        key,
        value,
        None,
        cum_seq_lens,
        len(key),
        len(cum_seq_lens) - 1,
        softmax_scale,
        return_lse=True,
        cum_seq_lens_q=cum_seq_lens_q,
        max_seq_len_q=len(query),
    )
