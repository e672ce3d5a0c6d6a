"""The pack by tsmla."""

import torch
from tsmla import mla_kv_pack_quantize_fp8


def run(k_nope, k_pe, v):
    """Return the bytes of keys and values in e4m3."""
    return tuple(x.view(torch.int8) for x in mla_kv_pack_quantize_fp8(k_nope, k_pe, v))
