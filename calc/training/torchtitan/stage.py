"""torchtitan's step on one device: its segments and constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from calc.breakdown import Number
from calc.errors import InputError
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import Layer, ModelSpec
from calc.training.autograd.blocks import Sizes
from calc.training.autograd.builder import Settings
from calc.training.autograd.leaves import Source, block_segment, rounded_leaf
from calc.training.autograd.segments import Constant, Segment
from calc.training.model_classes import MODEL_CLASSES, model_class
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import GRANULE
from calc.training.states.tensors import ModelTensors, Tensors, kind_path
from calc.training.torchtitan.blocks import embedding_block, layer_block
from calc.training.torchtitan.losses import chunked_loss_block, end_block, loss_block
from calc.units import ceil_div, round_up

PROGRAM = Source(
    "torchtitan 0.2.2 on PyTorch 2.13: what autograd saves, operator by operator (tools/autograd/derivatives.yaml)",
    "https://github.com/pytorch/torchtitan/tree/v0.2.2/torchtitan",
)
_LOSS = Tensors(("loss",), ())


def check_model(plan: TrainingPlan, spec: ModelSpec) -> None:
    """InputError unless torchtitan has a program for the model, and it is written here for the plan's layout."""
    if not model_class(spec.architecture).torchtitan:
        known = [name for name, found in MODEL_CLASSES.items() if found.torchtitan]
        raise InputError(
            f"implementation: 'torchtitan' has no program for {spec.name} ({spec.architecture or 'no architecture'}) here; "
            f"it is modelled for {', '.join(sorted(known))}",
            "implementation",
        )
    if spec.tied or not all(map(_plain, spec.layers.kinds)):
        raise InputError(
            f"implementation: 'torchtitan' is modelled for untied embeddings and layers without biases, which {spec.name} "
            "does not have",
            "implementation",
        )
    dense = all(isinstance(kind.mixer, Attention) and isinstance(kind.feed_forward, MLP) for kind in spec.layers.kinds)
    if "model" in plan.compile and not dense:
        raise InputError.of(
            "compile", ",".join(plan.compile), f"'torchtitan' with experts, as {spec.name} has, is modelled eagerly"
        )


def _plain(layer: Layer) -> bool:
    mixer, module = layer.mixer, layer.feed_forward
    mixes = isinstance(mixer, Attention | LatentAttention) and not mixer.bias
    dense = isinstance(module, MLP) and not module.bias
    return mixes and (dense or (isinstance(module, MoE) and not module.shared_gate and len(module.router) == 1))


def torchtitan_notes(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """What the estimate takes for granted of torchtitan's run."""
    if "model" not in plan.compile:
        yield "torchtitan 0.2.2, run eagerly (compile names what torch.compile compiles)"
    else:
        yield "torch.compile: what PyTorch 2.13's partitioner keeps; the order within a layer is Inductor's for one without collectives"
    if any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds):
        yield "experts: the rows that padding adds, up to 8 for each expert, are not counted"
        if plan.tp > 1:
            yield "experts next to tensor parallelism: by hand count of torchtitan's plan, which no trace was held against"
    if plan.pp > 1:
        yield "pipeline: gathered weights and all gradients in fp32 stay whole to the end of the step (fsdp_reshard_after_forward: default)"
    if plan.cp > 1:
        yield "context parallelism: the keys and values that ring attention gathers for a while are not counted"


def settings_of(plan: TrainingPlan, spec: ModelSpec) -> Settings:
    """What the blocks of this plan depend on."""
    return Settings(
        bytes=RECIPES[plan.recipe].compute,
        attention="sdpa",
        tp=plan.tp,
        ep=plan.ep,
        experts_of=plan.experts_of,
        whole_experts=plan.ep_over_tp and plan.tp > 1,
        sharded_sequence=plan.sharded_sequence,
        architecture=spec.architecture,
    )


def torchtitan_segments(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> list[Segment]:
    """The blocks in order of execution: embedding, layers, final norm with head, loss."""
    check_model(plan, spec)
    settings = settings_of(plan, spec)
    sizes = Sizes(plan.micro_batch, plan.seq // plan.cp, GRANULE)
    made = []
    if stage.first:
        made.append(
            block_segment(("embedding",), embedding_block(spec, settings), sizes, tensors.embedding, plan, PROGRAM)
        )
    levels = {plan.recompute} | ({"none"} if plan.recompute_every > 1 else set())
    kinds = {
        (kind, level): block_segment(
            path := kind_path(spec.layers, kind),
            layer_block(spec.layers.kinds[kind], path, settings, level, "model" in plan.compile),
            sizes,
            tensors.kinds[kind],
            plan,
            PROGRAM,
        )
        for kind in stage.counts
        for level in levels
    }
    for index, kind in enumerate(stage.layers, 1):  # of every two, the second is recomputed
        made.append(kinds[kind, "none" if index % plan.recompute_every else plan.recompute])
    return [*made, *_end(plan, spec, settings, sizes, tensors)] if stage.last else made


def _end(
    plan: TrainingPlan, spec: ModelSpec, settings: Settings, sizes: Sizes, tensors: ModelTensors
) -> Iterator[Segment]:
    """Final norm and head, and the loss."""
    chunked, compiled = plan.head_loss == "chunked", "loss" in plan.compile
    yield block_segment(("end",), end_block(spec, settings, head=not chunked), sizes, tensors.end, plan, PROGRAM)
    if chunked:
        loss = chunked_loss_block(spec, settings, compiled=compiled)
    else:
        outputs = plan.head_loss == "chunked-output"
        loss = loss_block(spec.vocab_size, settings, compiled=compiled, chunked=outputs)
    yield block_segment(("loss",), loss, sizes, _LOSS, plan, PROGRAM)


def torchtitan_constants(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> list[Constant]:
    """What the model or its caller keeps besides the blocks: tokens and labels, the loss, the rotary table."""
    batch, tokens = plan.micro_batch, plan.seq // plan.cp
    batch *= plan.microbatches if plan.pp > 1 else 1  # a pipeline is given all of them at once
    sizes: dict[str, Number] = {"b": batch, "s": tokens}
    made = [
        _constant(name, 8 * batch * tokens, r"8 \cdot <b> \cdot <s>", sizes, plan.pp == 1, "step")
        for name in ("input_ids", "labels")
    ]
    made += _pipeline_constants(plan, spec, stage) if plan.pp > 1 else ()
    if stage.last:
        made.append(replace(_constant("loss", 4, "4", {}, True, "step"), fixed=True, late=True))
        made.append(replace(_constant("loss_sum", 4, "4", {}, False, "layers"), fixed=True, late=True))
        made.append(_constant("loss_gradient", 4, "4", {}, False, "backward"))
    mixer = spec.layers.kinds[0].mixer
    assert isinstance(mixer, Attention | LatentAttention)
    turned = mixer.qk_rope_head_dim if isinstance(mixer, LatentAttention) else mixer.head_dim
    numbers: dict[str, Number] = {"s": plan.seq, "d": turned}
    cosines = model_class(spec.architecture).torchtitan == "cosines"
    width = 8 if cosines else 4  # cosines and sines, or a complex number for a pair of features
    name = "cosines_and_sines" if cosines else "rotations"
    made.append(_constant(name, width * plan.seq * turned, rf"{width} \cdot <s> \cdot <d>", numbers, False, "step"))
    for kind, count in sorted(stage.counts.items()):
        module = spec.layers.kinds[kind].feed_forward
        if isinstance(module, MoE):  # a bias for each expert, and how many tokens it had: fp32 buffers
            numbers = {"L": count, "E": module.num_experts}
            each = round_up(4 * module.num_experts, GRANULE)
            latex = r"2 \cdot <L> \cdot 512 \cdot \lceil \frac{4 \cdot <E>}{512} \rceil"
            made.append(_constant(f"balance_{kind}", 2 * count * each, latex, numbers, False, "step"))
    return made


def _pipeline_constants(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> Iterator[Constant]:
    """What a pipeline stage keeps (torch/distributed/pipelining/stage.py): a buffer for what it receives of each micro-batch, in forward
    and in backward, from the first step on; the output of each micro-batch in flight, of the last stage its logits. The gradient that
    backward begins with lies in one of the buffers, which is counted with the block."""
    passing = ceil_div(2 * plan.micro_batch * (plan.seq // plan.cp) * spec.hidden_size, plan.tp)
    logits = ceil_div(2 * plan.micro_batch * (plan.seq // plan.cp) * spec.vocab_size, plan.tp)
    forward, backward = ((stage.virtual - end) * plan.microbatches for end in (stage.first, stage.last))
    buffers = {"received_activations": forward, "received_gradients": max(backward - 1, 0)}
    for name, count in buffers.items():
        if count:
            numbers: dict[str, Number] = {"x": passing, "n": count}
            yield replace(_constant(name, count * passing, r"<n> \cdot <x>", numbers, False, "step"), fixed=True)
    if backward:
        yield _constant("received_gradient", passing, "<x>", {"x": passing}, False, "end")
    size = logits if stage.last and stage.virtual == 1 else passing
    yield _constant("sent", size, "<x>", {"x": size}, True, "layers")


def _constant(name: str, exact: int, latex: str, numbers: dict[str, Number], each: bool, until: str) -> Constant:
    return Constant(rounded_leaf(name, exact, latex, numbers, PROGRAM), each, until)
