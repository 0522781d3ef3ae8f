"""KV caches of well-known models, one for each kind of attention, growing with the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from calc.catalogue import load
from calc.serving import ServingPlan
from calc.serving.cache import cache_of

SOURCE: Final = "GQA, arXiv 2305.13245; DeepSeek-V2 (MLA), arXiv 2405.04434, section 2.1; Mistral 7B (windows), arXiv 2310.06825, section 2"
KINDS: Final[Mapping[str, str]] = {
    "MHA: Llama-2-7B": "llama-2-7b",
    "GQA: Llama-3-8B": "meta-llama-3-8b",
    "MQA: Falcon-7B": "falcon-7b",
    "MLA: DeepSeek-V3": "deepseek-v3",
    "windows: Gemma-3-12B": "gemma-3-12b-it",
    "state: Mamba-370M": "mamba-370m-hf",
}


class CacheKindsPlan(BaseModel):
    """How many tokens a sequence has; keys and values are in 16 bits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cached: int = Field(32768, ge=1, le=2**20, description="tokens of one sequence")


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One model's cache: bytes at the plan's tokens, bytes of one token more, and points (tokens, bytes)."""

    name: str
    layers: int
    bytes: int
    token_bytes: int
    points: tuple[tuple[int, int], ...]


def cache_kinds(plan: CacheKindsPlan) -> tuple[CacheKind, ...]:
    """The cache of one sequence, by the same code that answers `serve`."""
    at = sorted({2**power for power in range(7, 21)} | {plan.cached})
    found = []
    for name, model in KINDS.items():
        spec = load(model)
        cache, counts = cache_of(spec, ServingPlan()), spec.layers.counts
        points = tuple((tokens, cache.sequence_bytes(counts, tokens)) for tokens in at)
        more = cache.sequence_bytes(counts, plan.cached + 1) - dict(points)[plan.cached]
        found.append(CacheKind(name, len(spec.layers), dict(points)[plan.cached], more, points))
    return tuple(found)
