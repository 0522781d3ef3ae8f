"""FLOPs of a model: of one token part by part, and of training pass by pass."""

from calc.flops.by_pass import PassFlops, adapter_flops, pass_flops
from calc.flops.per_token import TokenFlops, encoders, token_flops

__all__ = ["PassFlops", "TokenFlops", "adapter_flops", "encoders", "pass_flops", "token_flops"]
