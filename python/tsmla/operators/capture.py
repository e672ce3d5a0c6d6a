"""Whether a CUDA graph is being captured."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch without CUDA
        return False
