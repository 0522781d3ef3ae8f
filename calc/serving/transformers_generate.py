"""transformers `generate`: a cache that grows by concatenation, and so is held twice."""

from __future__ import annotations

from dataclasses import replace

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.activations import activations
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, logical
from calc.serving.plan import ServingPlan
from calc.serving.sglang import CONTEXT
from calc.serving.stages import Load

_SOURCE = (
    "transformers 5, cache_utils.py, DynamicLayer.update: torch.cat of the old cache and the new token; torch's allocator keeps the "
    "blocks of the shorter copies, each too small for the next"
)
_URL = "https://github.com/huggingface/transformers"


def parts(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The prefill of all prompts at once with the last token's logits; and CUDA's context."""
    whole = plan.model_copy(
        update={"max_batched_tokens": plan.concurrency * plan.prompt_tokens, "max_seqs": plan.concurrency}
    )
    formula = Formula("<o>", "llm-d-benchmark: memory that is gone on an H100 before a program starts", "")
    context = Component("context", CONTEXT, formula=formula, numbers={"o": CONTEXT})
    return activations(spec, whole, last=layers.stop == spec.num_hidden_layers), (context,)


def copies(plan: ServingPlan, sequence: int) -> Component:
    """The second copy of every sequence's cache."""
    formula = Formula(r"<B> \cdot <c>", _SOURCE, _URL, ("a static cache has no copy",))
    return Component(
        "cache_copies", plan.concurrency * sequence, formula=formula, numbers={"B": plan.concurrency, "c": sequence}
    )


def transformers_generate(plan: ServingPlan, gpu: Gpu | None, cache: Cache, loads: tuple[Load, ...]) -> Capacity:
    """Sequences whose cache fits twice."""
    doubled = tuple(replace(load, reserved=(*load.reserved, copies(plan, load.sequence))) for load in loads)
    found = logical(plan, gpu, cache, doubled, 1.0)
    alone = logical(plan, gpu, cache, loads, 1.0)
    concurrency = None if alone.concurrency is None else alone.concurrency / 2
    tokens = None if alone.tokens is None else alone.tokens // 2
    return replace(found, blocks=None, tokens=tokens, concurrency=concurrency)
