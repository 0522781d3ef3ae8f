"""A pipeline stage of the `fused` and `paper` implementations: segments whose blocks come from ledgers."""

from __future__ import annotations

from functools import lru_cache

from calc.breakdown import Component, Formula
from calc.model.mixers import Attention, CompressedAttention, LatentAttention
from calc.model.spec import ModelSpec
from calc.model.weights import Dim, dim
from calc.training.autograd.blocks import Block, Sizes
from calc.training.autograd.leaves import Source, block_segment
from calc.training.autograd.segments import Constant, Segment
from calc.training.megatron.paper import Layout, ledger_embedding, paper_end, paper_layer
from calc.training.megatron.transformer_engine import fused_end, fused_layer
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import RECIPES
from calc.training.states.tensors import ModelTensors, Tensors, kind_path, model_tensors
from calc.units import ceil_div

SOURCES = {
    "fused": Source(
        "Megatron-LM with Transformer Engine: fused norms, flash attention, fused activation; norm statistics and logsumexp left out",
        "https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/transformer",
    ),
    "paper": Source("arXiv 2205.05198, sections 4.1 to 4.3 and table 2", "https://arxiv.org/abs/2205.05198"),
}


def ledger_segments(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> list[Segment]:
    """The stage's blocks in order of execution."""
    fused = plan.implementation == "fused"
    dropped = tuple(place for place, _ in spec.dropout) if plan.dropout == "config" else ()
    layout = Layout(
        plan.implementation,
        plan.tp,
        plan.sharded_sequence,
        plan.recompute,
        plan.head_loss,
        _gradient(plan),
        plan.recompute_modules,
        dropped,
    )
    h = dim("h", spec.hidden_size)
    sizes = Sizes(plan.micro_batch, plan.seq // plan.cp, 1)
    source = SOURCES[plan.implementation]
    made: list[Segment] = []

    def add(path: tuple[str, ...], block: Block, weights: Tensors) -> None:
        made.append(block_segment(path, block, sizes, weights, plan, source))

    if stage.first:
        add(("embedding",), ledger_embedding(h, tensors.embedding.elements, layout), tensors.embedding)
    cached: dict[int, Segment] = {}
    for kind in stage.layers:
        if kind not in cached:
            weights = tensors.kinds[kind]
            path, layer = kind_path(spec.layers, kind), spec.layers.kinds[kind]
            if fused:
                feed = sum(tensor.elements for tensor in weights.tensors if tensor.path[0] in _FEED_FORWARD)
                block = fused_layer(layer, path, h, weights.elements - feed, feed, layout)
            else:
                block = paper_layer(path, h, _heads(spec), weights.elements, layout)
            add(path, block, weights)
            cached[kind] = made.pop()
        made.append(cached[kind])
    if stage.last:
        add(("end",), _end(spec, h, tensors, layout), tensors.end)
    return made


def _end(spec: ModelSpec, h: Dim, tensors: ModelTensors, layout: Layout) -> Block:
    elements = tensors.end.elements
    if layout.implementation == "paper":
        return paper_end(spec, h, elements, layout)
    tied = tensors.tied_head.elements if spec.tied else 0
    head = tied or sum(tensor.elements for tensor in tensors.end.tensors if tensor.path[0] == "head")
    return fused_end(spec, h, elements + tied, head, layout)


_FEED_FORWARD = frozenset({"mlp", "router", "experts", "shared_expert", "latent"})


def _gradient(plan: TrainingPlan) -> int:
    """Bytes of a weight's gradient that backward keeps: none where it is added to the main gradient at once."""
    recipe = RECIPES[plan.recipe]
    return 0 if any(state.name == "main_gradient" for state in recipe.states) else recipe.compute


def ledger_constants(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> list[Constant]:
    """Transformer Engine's placeholders for gradients that were added to the main ones: one for each shape of a linear layer's
    weight, kept for good."""
    if plan.implementation != "fused" or _gradient(plan):
        return []
    tensors = model_tensors(spec, plan.tp, plan.ep, None, plan.ep_over_tp)
    shapes = {shape for kind in stage.counts for shape in _shapes(tensors.kinds[kind])}
    elements = sum(first * rest for first, rest in shapes)
    formula = Formula(r"2 \cdot <elements>", *_PLACEHOLDERS)
    leaf = Component("placeholder_gradients", 2 * elements, formula=formula, numbers={"elements": elements})
    return [Constant(leaf, False, "step", fixed=True)] if elements else []


_PLACEHOLDERS = (
    "Transformer Engine, get_dummy_wgrad in transformer_engine/pytorch/module/base.py: elements of every shape once",
    "https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/module/base.py",
)
# What Megatron holds in one weight: queries, keys and values; gate and up.
_TOGETHER = {"query": "query_key_value", "key": "query_key_value", "value": "query_key_value", "gate": "up"}


def score_buffer(plan: TrainingPlan, spec: ModelSpec) -> int:
    """Bytes of 16-bit scores of one layer that Megatron's unfused attention (`paper`) keeps besides those of the equations."""
    if plan.implementation != "paper":
        return 0
    return 2 * plan.micro_batch * ceil_div(_heads(spec), plan.tp) * (plan.seq // plan.cp) ** 2


@lru_cache(maxsize=512)
def _shapes(weights: Tensors) -> frozenset[tuple[int, int]]:
    """Shapes of the weights of a layer's linear layers. The router is Megatron's own and has none. Cached: a group hashes by identity."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for tensor in weights.tensors:
        part, name = tensor.path[0], tensor.path[-1]
        if tensor.matrix and part != "router":
            key = (part, _TOGETHER.get(name, name))
            found[key] = (found.get(key, (0, 0))[0] + tensor.first, tensor.rest)
    return frozenset(found.values())


def _heads(spec: ModelSpec) -> int:
    """The query heads that the paper's equation asks for."""
    mixers = [kind.mixer for kind in spec.layers.kinds]
    found = [m.num_attention_heads for m in mixers if isinstance(m, Attention | LatentAttention | CompressedAttention)]
    return max(found, default=1)
