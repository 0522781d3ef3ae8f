"""The rollout of GRPO: transformers' `generate` over all prompts of an optimizer step, with its cache of keys and values."""

from __future__ import annotations

from dataclasses import replace

from calc.breakdown import Component, Number
from calc.model.spec import ModelSpec
from calc.serving.cache import Kept, kept_tensors
from calc.training.autograd.blocks import Sizes, alive_at, block_bytes
from calc.training.autograd.leaves import Source, rounded_leaf, storage_tree
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import GRANULE
from calc.training.states.tensors import kind_path
from calc.training.transformers.decoder import embedding_block, layer_block
from calc.training.transformers.stage import settings_of

GENERATE = Source(
    "transformers 5.24, generation/utils.py and cache_utils.py: DynamicCache, joined anew for each token, and sampling in fp32",
    "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/generation/utils.py",
)
_SAMPLING = 2 * 4  # bytes a word: the scores and the probabilities, both fp32


def rollout(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Component, ...]:
    """What generating holds at its highest point besides weights and states: reading the prompts, a layer's turn at the last token,
    or the choice of that token."""
    largest = max((_prompts, _last_layer, _choice), key=lambda part: _sum(part(plan, spec, stage)))
    return (*_tokens(plan), *largest(plan, spec, stage))


def _sum(leaves: tuple[Component, ...]) -> int:
    return sum(int(leaf.total) for leaf in leaves)


def _tokens(plan: TrainingPlan) -> tuple[Component, ...]:
    """The tokens so far and their mask, each joined anew."""
    numbers: dict[str, Number] = {"B": plan.generated, "s": plan.seq}
    size = 8 * plan.generated * plan.seq
    return tuple(rounded_leaf(name, size, r"8 \cdot <B> \cdot <s>", numbers, GENERATE) for name in ("tokens", "mask"))


def _cached(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tokens: int) -> tuple[Component, ...]:
    """Keys and values of so many tokens of every sequence, in all layers."""
    made = []
    for index, kept in enumerate(_kinds(spec)):
        count = stage.counts[index]
        leaves = tuple(_one(plan, spec, tensor, tokens) for tensor in kept) if count else ()
        if leaves:
            made.append(Component(f"cache_{kind_path(spec.layers, index)[-1]}", children=leaves, count=count))
    return tuple(made)


def _kinds(spec: ModelSpec) -> tuple[tuple[Kept, ...], ...]:
    return kept_tensors(spec, 1, 0, 0, False)


def _one(plan: TrainingPlan, spec: ModelSpec, kept: Kept, tokens: int) -> Component:
    size = settings_of(plan, spec).bytes
    cached = min(tokens, kept.most - 1) if kept.most else tokens
    numbers: dict[str, Number] = {"w": size, "B": plan.generated, "n": cached, **dict(kept.numbers)}
    return rounded_leaf(
        kept.name,
        size * plan.generated * cached * kept.elements,
        rf"<w> \cdot <B> \cdot <n> \cdot {kept.latex}",
        numbers,
        GENERATE,
    )


def _working(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tokens: int) -> Component:
    """The widest block of a pass without gradients over so many tokens of every sequence."""
    settings = replace(settings_of(plan, spec), lora=None, frozen=True, dropout=())
    sizes = Sizes(plan.generated, tokens, GRANULE)
    blocks = [embedding_block(spec, settings)]
    for kind in dict.fromkeys(stage.layers):
        path = kind_path(spec.layers, kind)
        blocks.append(layer_block(spec.layers.kinds[kind], path, settings, False, False, settings.bytes))
    block = max(blocks, key=lambda found: block_bytes(found, sizes).forward_peak)
    return Component("working", children=storage_tree(alive_at(block, sizes, "forward", False), sizes, plan, GENERATE))


def _prompts(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Component, ...]:
    numbers: dict[str, Number] = {
        "w": settings_of(plan, spec).bytes,
        "B": plan.generated,
        "p": plan.prompt_tokens,
        "h": spec.hidden_size,
    }
    size = int(numbers["w"]) * plan.generated * plan.prompt_tokens * spec.hidden_size
    embedded = rounded_leaf("embedded", size, r"<w> \cdot <B> \cdot <p> \cdot <h>", numbers, GENERATE)
    return (*_cached(plan, spec, stage, plan.prompt_tokens), embedded, _working(plan, spec, stage, plan.prompt_tokens))


def _last_layer(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Component, ...]:
    """The cache before the last token, while a layer's keys are joined anew: the old ones are there too."""
    tokens = plan.seq - 1
    kept = _kinds(spec)[stage.layers[-1]]
    joined = tuple(replace(_one(plan, spec, tensor, tokens), name="joined_before") for tensor in kept[:1])
    return (*_cached(plan, spec, stage, tokens), *joined, _working(plan, spec, stage, 1))


def _choice(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Component, ...]:
    """The logits of the last position in the model's format and in fp32, and their probabilities."""
    numbers: dict[str, Number] = {"B": plan.generated, "V": spec.vocab_size, "w": settings_of(plan, spec).bytes}
    size = (int(numbers["w"]) + _SAMPLING) * plan.generated * spec.vocab_size
    chosen = rounded_leaf("choice", size, rf"(<w> + {_SAMPLING}) \cdot <B> \cdot <V>", numbers, GENERATE)
    return (*_cached(plan, spec, stage, plan.seq - 1), chosen)
