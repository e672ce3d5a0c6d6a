"""FlashInfer's MLA functions with the arguments of FlashInfer 0.7.2, computed by tsmla's operators.

docs/start/compat.md has what is the same, what is refused and what is better.
"""

from .decode import trtllm_batch_decode_with_kv_cache_mla
from .paged import BatchMLAPagedAttentionWrapper
from .ragged import trtllm_ragged_attention_deepseek

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
]
