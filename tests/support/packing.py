"""What this processor can pack."""

from __future__ import annotations

import torch


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this processor has what oneDNN needs for products in a dtype."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(24, 16, dtype=dtype), 17)
    except RuntimeError:
        return False
    return True
