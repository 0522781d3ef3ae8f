"""vLLM: its memory by version, and its pool of cache blocks."""

from calc.serving.vllm.capacity import vllm
from calc.serving.vllm.profile import profile
from calc.serving.vllm.reserved import reserved

__all__ = ["profile", "reserved", "vllm"]
