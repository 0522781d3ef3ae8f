"""torchtitan's step on one device: its segments, and what lives beside them."""

from __future__ import annotations

from dataclasses import replace

from calc.breakdown import Component, Formula, Number
from calc.errors import InputError
from calc.model.feed_forward import MLP
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec
from calc.training.blocks import Sizes
from calc.training.hf_stage import Source, block_segment
from calc.training.plan import TrainingPlan
from calc.training.program import Settings
from calc.training.recipes import RECIPES
from calc.training.segments import Constant, Segment
from calc.training.stages import Stage
from calc.training.states import GRANULE
from calc.training.tensors import ModelTensors, Tensors, kind_path
from calc.training.torchtitan import COSINES, MODELS, embedding_block, end_block, layer_block, loss_block
from calc.units import round_up

PROGRAM = Source(
    "torchtitan 0.2.2 on PyTorch 2.13: what autograd saves, operator by operator (tools/autograd/derivatives.yaml)",
    "https://github.com/pytorch/torchtitan/tree/v0.2.2/torchtitan",
)
_LOSS = Tensors(("loss",), ())


def check_model(spec: ModelSpec) -> None:
    """InputError unless torchtitan has a program for the model, and this ledger holds it."""
    if spec.architecture not in MODELS:
        raise InputError(
            f"implementation: 'torchtitan' has no program for {spec.name} ({spec.architecture or 'no architecture'}) here; "
            f"it is modelled for {', '.join(sorted(MODELS))}",
            "implementation",
        )
    if spec.tied or any(not _plain(kind) for kind in spec.layers.kinds):
        raise InputError(
            f"implementation: 'torchtitan' is modelled for untied embeddings and dense layers without biases, which {spec.name} "
            "does not have",
            "implementation",
        )


def _plain(layer: Layer) -> bool:
    mixer, module = layer.mixer, layer.feed_forward
    return isinstance(mixer, Attention) and isinstance(module, MLP) and not mixer.bias and not module.bias


def settings_of(plan: TrainingPlan, spec: ModelSpec) -> Settings:
    """What the blocks of this plan depend on."""
    return Settings(
        bytes=RECIPES[plan.recipe].compute,
        attention="sdpa",
        tp=plan.tp,
        sharded_sequence=plan.sharded_sequence,
        router=spec.architecture,
    )


def torchtitan_segments(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> list[Segment]:
    """The blocks in order of execution: embedding, layers, final norm with head, loss."""
    check_model(spec)
    settings = settings_of(plan, spec)
    sizes = Sizes(plan.micro_batch, plan.seq // plan.cp, GRANULE)
    made = [block_segment(("embedding",), embedding_block(spec, settings), sizes, tensors.embedding, plan, PROGRAM)]
    kinds = {
        kind: block_segment(
            path := kind_path(spec.layers, kind),
            layer_block(spec.layers.kinds[kind], path, settings, plan.recompute),
            sizes,
            tensors.kinds[kind],
            plan,
            PROGRAM,
        )
        for kind in stage.counts
    }
    made += [kinds[kind] for kind in stage.layers]
    made.append(block_segment(("end",), end_block(spec, settings), sizes, tensors.end, plan, PROGRAM))
    made.append(block_segment(("loss",), loss_block(spec.vocab_size, settings), sizes, _LOSS, plan, PROGRAM))
    return made


def torchtitan_constants(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> list[Constant]:
    """What lives beside the blocks: tokens and labels, the loss, the rotary table that is the model's buffer."""
    batch, tokens = plan.micro_batch, plan.seq // plan.cp
    sizes: dict[str, Number] = {"b": batch, "s": tokens}
    made = [
        _constant(name, 8 * batch * tokens, r"8 \cdot <b> \cdot <s>", sizes, True, "step")
        for name in ("input_ids", "labels")
    ]
    made.append(replace(_constant("loss", 4, "4", {}, True, "step"), fixed=True, late=True))
    made.append(replace(_constant("loss_sum", 4, "4", {}, False, "layers"), fixed=True, late=True))
    made.append(_constant("loss_gradient", 4, "4", {}, False, "backward"))
    mixer = spec.layers.kinds[0].mixer
    assert isinstance(mixer, Attention)
    numbers: dict[str, Number] = {"s": plan.seq, "d": mixer.head_dim}
    width = 8 if spec.architecture in COSINES else 4  # cosines and sines, or a complex number for a pair of features
    name = "cosines_and_sines" if spec.architecture in COSINES else "rotations"
    size = width * plan.seq * mixer.head_dim
    made.append(_constant(name, size, rf"{width} \cdot <s> \cdot <d>", numbers, False, "step"))
    return made


def _constant(name: str, exact: int, latex: str, numbers: dict[str, Number], each: bool, until: str) -> Constant:
    value = round_up(exact, GRANULE)
    latex = latex if value == exact else rf"512 \cdot \lceil \frac{{{latex}}}{{512}} \rceil"
    return Constant(
        Component(name, value, formula=Formula(latex, PROGRAM.text, PROGRAM.url), numbers=numbers), each, until
    )
