"""Other people's counts of activations, to be compared with ours."""

from __future__ import annotations


def zero_paper_activations(batch: int, seq: int, hidden_size: int, layers: int) -> int:
    """Bytes by the ZeRO paper's own count: 12 · b · s · h · L two-byte values (arXiv 1910.02054, section 3.2)."""
    return 2 * 12 * batch * seq * hidden_size * layers
