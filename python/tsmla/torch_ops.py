"""torch.ops.tsmla: importing this registers all operators there, for processes that only run an exported graph."""

from .operators import decode, key_mask, pack, prefill, quantize_q, read_cache, registered, write_cache

__all__ = ["decode", "key_mask", "pack", "prefill", "quantize_q", "read_cache", "registered", "write_cache"]
