"""Attention as first written, for contrast with flash attention: scores and probabilities lie in memory, O(s²) each.

Plain PyTorch by intention: the two products are the vendor's matmuls, and what is being shown is the memory between them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def standard_attention(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """out = softmax(scale·q·kᵀ)·v, with the meaning of `flash_attention` and any float dtype.

    2·B·H·Sq·Sk·(D + Dv) FLOPs. Moves the inputs and the output, and four times B·H·Sq·Sk elements (scores
    written and read, probabilities written and read; more for the mask); backward keeps the probabilities.
    """
    scale = 1 / math.sqrt(q_BHSD.shape[-1]) if scale is None else scale
    group = q_BHSD.shape[1] // k_BHSD.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k_BHSD, v_BHSD))
    scores = q_BHSD @ k.transpose(-1, -2) * scale
    seen = visible(q_BHSD.shape[2], k.shape[2], causal, window, q_BHSD.device)
    if seen is None:
        return torch.softmax(scores, -1) @ v
    probabilities = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return probabilities.masked_fill(~seen.any(-1, keepdim=True), 0) @ v  # a query that sees no key gets zeros, not NaN


def visible(sq: int, sk: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """(sq, sk) of bool: which keys each query sees; None when it is all of them. The last query meets the last key."""
    if not causal:
        return None
    distance = torch.arange(sq, device=device)[:, None] + (sk - sq) - torch.arange(sk, device=device)
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
