"""torch.ops.tsmla: importing this registers all operators there, for processes that only run an exported graph."""

from .operators import decode, pack, prefill, quantize_q, read_cache, registered, write_cache

__all__ = ["decode", "pack", "prefill", "quantize_q", "read_cache", "registered", "write_cache"]
