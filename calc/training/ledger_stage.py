"""A pipeline stage of the `fused` and `paper` implementations: segments whose blocks come from ledgers."""

from __future__ import annotations

from calc.model.mixers import Attention, CompressedAttention, LatentAttention
from calc.model.spec import ModelSpec
from calc.model.weights import dim
from calc.training.blocks import Block, Sizes
from calc.training.hf_stage import Source, block_segment
from calc.training.ledgers import Layout, ledger_embedding, ledger_end, ledger_layer
from calc.training.plan import TrainingPlan
from calc.training.recipes import RECIPES
from calc.training.segments import Segment
from calc.training.stages import Stage
from calc.training.tensors import ModelTensors, Tensors, kind_path

SOURCES = {
    "fused": Source(
        "Megatron-LM with Transformer Engine: fused norms, flash attention, fused activation; norm statistics and logsumexp left out",
        "https://github.com/NVIDIA/TransformerEngine",
    ),
    "paper": Source("arXiv 2205.05198, sections 4.1 to 4.3 and table 2", "https://arxiv.org/abs/2205.05198"),
}


def ledger_segments(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> list[Segment]:
    """The stage's blocks in order of execution."""
    recipe = RECIPES[plan.recipe]
    fused_gradients = any(state.name == "main_gradient" for state in recipe.states)
    layout = Layout(
        plan.implementation, plan.tp, plan.sharded_sequence, plan.recompute, plan.loss, 0 if fused_gradients else recipe.compute
    )  # fmt: skip
    h = dim("h", spec.hidden_size)
    sizes = Sizes(plan.micro_batch, plan.seq // plan.cp, 1)
    source = SOURCES[plan.implementation]
    made: list[Segment] = []

    def add(path: tuple[str, ...], block: Block, held: Tensors) -> None:
        made.append(block_segment(path, block, sizes, held, plan, source))

    if stage.first:
        add(("embedding",), ledger_embedding(h, tensors.embedding.elements, layout), tensors.embedding)
    cached: dict[int, Segment] = {}
    for kind in stage.layers:
        if kind not in cached:
            held = tensors.kinds[kind]
            path, layer = kind_path(spec.layers, kind), spec.layers.kinds[kind]
            block = ledger_layer(layer, path, h, _heads(spec), held.elements, layout)
            add(path, block, held)
            cached[kind] = made.pop()
        made.append(cached[kind])
    if stage.last:
        add(("end",), ledger_end(spec, h, tensors.end.elements, layout), tensors.end)
    return made


def _heads(spec: ModelSpec) -> int:
    """The query heads that the paper's equation asks for."""
    mixers = [kind.mixer for kind in spec.layers.kinds]
    found = [m.num_attention_heads for m in mixers if isinstance(m, Attention | LatentAttention | CompressedAttention)]
    return max(found, default=1)
