"""The decode of chosen keys by tsmla."""

from tsmla import tsmla_sparse_prefill


def run(query, kv_cache, indices, softmax_scale):
    """Return the output and the LSE in base 2."""
    return tsmla_sparse_prefill(query, kv_cache, indices, softmax_scale, return_lse=True, lse_base=2.0)
