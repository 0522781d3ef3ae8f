"""A pipeline stage of the transformers program: its segments, and what the model itself keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from calc.breakdown import Number
from calc.model.feed_forward import MoE
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import ModelSpec
from calc.training.autograd.blocks import Sizes
from calc.training.autograd.builder import Settings
from calc.training.autograd.leaves import Source, block_segment, rounded_leaf
from calc.training.autograd.liger_operators import chunk_tokens
from calc.training.autograd.segments import Constant, Segment
from calc.training.model_classes import model_class
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.recipes import RECIPES
from calc.training.states.sharding import GRANULE
from calc.training.states.tensors import FIRST_ADAPTED, ModelTensors, kind_path
from calc.training.transformers.decoder import embedding_block, end_block, layer_block
from calc.training.transformers.log_probabilities import Scored
from calc.training.transformers.own_constants import class_constants
from calc.units import ceil_div, round_up

PROGRAM = Source(
    "transformers 5.24 on PyTorch 2.13: what autograd saves, operator by operator (tools/autograd/derivatives.yaml)",
    "https://github.com/pytorch/pytorch/blob/v2.13.0/tools/autograd/derivatives.yaml",
)


def settings_of(plan: TrainingPlan, spec: ModelSpec) -> Settings:
    """What the blocks of this plan depend on."""
    recipe = RECIPES[plan.recipe]
    shorter = [window for window in _windows(spec) if window <= plan.seq]
    return Settings(
        bytes=recipe.weight if recipe.autocast or not recipe.gathered else recipe.compute,
        autocast=recipe.autocast,
        attention=attention_of(plan, spec),
        dropout=spec.dropout if plan.dropout == "config" else (),
        tp=plan.tp,
        ep=plan.ep,
        sharded_sequence=plan.sharded_sequence,
        lora=plan.lora,
        architecture=spec.architecture,
        several=plan.sequences > 1 or attention_of(plan, spec) != "eager",
        longest_masked=max(shorter, default=0),
        litgpt=plan.implementation == "litgpt",
        torchtune=plan.implementation == "torchtune",
        compiled="model" in plan.compile and plan.method == "full",
        compiled_loss="loss" in plan.compile,
        loss_format="fp32" if plan.loss_format == "model" and recipe.autocast else plan.loss_format,
        liger=model_class(spec.architecture).liger if plan.implementation == "liger" else None,
    )


@lru_cache(maxsize=256)
def _windows(spec: ModelSpec) -> tuple[int, ...]:
    mixers = [kind.mixer for kind in spec.layers.kinds]
    return tuple(mixer.window or mixer.chunk for mixer in mixers if isinstance(mixer, Attention))


def attention_of(plan: TrainingPlan, spec: ModelSpec) -> str:
    """The attention that the model class really runs: those with capped scores or sinks have no SDPA in transformers."""
    return "eager" if plan.attention == "sdpa" and needs_eager(spec) else plan.attention


@lru_cache(maxsize=256)
def needs_eager(spec: ModelSpec) -> bool:
    mixers = [kind.mixer for kind in spec.layers.kinds]
    return model_class(spec.architecture).eager_only or any(
        isinstance(mixer, Attention) and (mixer.softcap or mixer.sinks) for mixer in mixers
    )


def hf_segments(plan: TrainingPlan, spec: ModelSpec, stage: Stage, tensors: ModelTensors) -> list[Segment]:
    """The stage's blocks in order of execution."""
    settings = settings_of(plan, spec)
    sizes = Sizes(plan.sequences, plan.seq // plan.cp, GRANULE)
    residual = settings.bytes
    frozen = settings.lora is not None
    recompute = plan.recompute == "full"
    made: list[Segment] = []
    if stage.first:
        made.append(
            block_segment(
                ("embedding",),
                embedding_block(spec, settings, frozen and recompute and not settings.trains_embedding),
                sizes,
                tensors.embedding,
                plan,
                PROGRAM,
            )
        )
    cached: dict[tuple[int, str], Segment] = {}
    for index, kind in enumerate(stage.layers):
        trains = recompute or settings.trains_embedding or not (frozen and stage.begins and index == 0)
        place, own = "other" if trains else "first", settings
        if plan.lora and plan.lora.prompts and stage.begins and index <= FIRST_ADAPTED:  # no prompts before this layer
            place, trains = f"layer_{index}", plan.lora.scales and index > 0
            own = settings if index == FIRST_ADAPTED else _without_prompts(settings)
        if (kind, place) not in cached:
            path = kind_path(spec.layers, kind)
            if frozen:  # no gradient flows into the very first layer, so that it keeps less
                path = (*path, place)
            block = layer_block(spec.layers.kinds[kind], path, own, recompute, trains, residual)
            cached[kind, place] = block_segment(path, block, sizes, tensors.kinds[kind], plan, PROGRAM)
        made.append(cached[kind, place])
    if stage.last:
        scored = scored_by(plan, OUTPUTS.get(plan.objective, ()), plan.scores and not made[1].keeps_input)
        block = end_block(
            spec, settings, plan.head_loss, plan.sequences > 1, residual, True, _chunk(plan, spec), scored
        )
        made.append(block_segment(("end",), block, sizes, tensors.end, plan, PROGRAM))
    return made


def _without_prompts(settings: Settings) -> Settings:
    """The layers that LLaMA-Adapter leaves as they are; of its second version, those that have biases and scales alone."""
    assert settings.lora is not None
    if settings.lora.scales:
        return replace(settings, lora=replace(settings.lora, prompted=False))
    return replace(settings, frozen=True)


OUTPUTS = {  # of TRL's head for each position, by its trainers
    "dpo": ("log_probabilities", "entropy", "mean_logits", "is_largest"),
    "grpo": ("log_probabilities", "entropy"),
}


def scored_by(plan: TrainingPlan, outputs: tuple[str, ...], embedded: bool) -> Scored | None:
    """What a pass scores; None for one whose loss is over all tokens."""
    if not outputs:
        return None
    return Scored(plan.sequences * (plan.seq - plan.prompt_tokens), plan.sequences * (plan.seq - 1), outputs, embedded)


def _chunk(plan: TrainingPlan, spec: ModelSpec) -> tuple[int, int]:
    """Tokens in a chunk of the fused loss, and chunks in all."""
    if plan.head_loss != "fused":
        return (1, 1)
    tokens = plan.sequences * plan.seq // plan.cp
    patches = model_class(spec.architecture).liger
    times = patches.logits if patches else 1
    rows = chunk_tokens(tokens, times * spec.hidden_size, ceil_div(spec.vocab_size, plan.tp))
    return rows, ceil_div(tokens, rows)


def hf_constants(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> list[Constant]:
    """What the model or its caller keeps besides the blocks: token ids, loss, rotary tables and their frequencies."""
    batch, tokens, own = plan.sequences, plan.seq // plan.cp, model_class(spec.architecture)
    settings = settings_of(plan, spec)
    made = [
        _constant("input_ids", 8 * batch * tokens, r"8 \cdot <b> \cdot <s>", {"b": batch, "s": tokens}, True, "step"),
        replace(_constant("loss", 4, "4", {}, True, "step"), fixed=True),
        _constant("loss_gradient", 4, "4", {}, False, "backward"),
    ]
    table = any(weight.name == "position" for weight in spec.embeddings) and plan.method == "full"  # keeps them itself
    if plan.recompute == "full" and not table and not own.own_position_ids:  # a checkpoint holds its layer's arguments
        made.append(_constant("position_ids", 8 * tokens, r"8 \cdot <s>", {"s": tokens}, False, "layers"))
    if plan.recompute == "full" and plan.lora and not plan.lora.saves_embedding and stage.first:
        numbers: dict[str, Number] = {
            "b": batch,
            "s": tokens,
            "h": spec.hidden_size,
            "w": settings.bytes,
        }
        size = 2 * numbers["w"] * batch * tokens * spec.hidden_size
        latex = r"2 \cdot <w> \cdot <b> \cdot <s> \cdot <h>"  # the loss still holds the graph, and the graph its leaves
        made.append(_constant("embeddings_and_gradient", int(size), latex, numbers, True, "end"))
    if plan.keep_logits or plan.implementation == "litgpt":
        size = 4 if plan.loss_format == "upcast" else 2 if RECIPES[plan.recipe].autocast else settings.bytes
        numbers = {"b": batch, "s": tokens, "V": spec.vocab_size}
        exact, latex = size * batch * tokens * spec.vocab_size, rf"{size} \cdot <b> \cdot <s> \cdot <V>"
        made.append(replace(_constant("kept_logits", exact, latex, numbers, True, "step"), late=True))
    made += _masks(plan, spec, settings)
    made += [_constant(*row) for row in class_constants(plan, spec, settings)]
    for name, size, latex, numbers in _router_buffers(spec, stage):
        made.append(_constant(name, size, latex, numbers, False, "step"))
    if spec.embedding_scale:
        made.append(_constant("embedding_scale", 4, "4", {}, False, "step"))
    recipe = RECIPES[plan.recipe]
    size = recipe.compute if recipe.gathered else recipe.weight
    size = 4 if own.rotary_tables in ("fp32", "complex") else size
    widths = () if own.rotary_tables == "none" else _rotary_widths(spec)
    for number, width in enumerate(widths, 1):
        suffix = f"_{number}" if len(widths) > 1 else ""
        half = 2 if own.rotary_tables == "half" else 1
        latex = rf"{size} \cdot <s> \cdot <d>" if half == 1 else rf"{size} \cdot <s> \cdot \frac{{<d>}}{{2}}"
        for name in ("rotations",) if own.rotary_tables == "complex" else ("cosines", "sines"):
            made.append(
                _constant(
                    name + suffix, size * tokens * width // half, latex, {"s": tokens, "d": width}, False, "layers"
                )
            )
        for name in ("frequencies", "original_frequencies"):
            made.append(_constant(name + suffix, 2 * width, r"2 \cdot <d>", {"d": width}, False, "step"))
    return made


def _router_buffers(spec: ModelSpec, stage: Stage) -> Iterator[tuple[str, int, str, dict[str, Number]]]:
    """The correction biases of routers that balance without a loss: fp32 buffers, no parameters (DeepSeek-V3)."""
    if not model_class(spec.architecture).corrected_router:
        return
    for kind, count in sorted(stage.counts.items()):
        module = spec.layers.kinds[kind].feed_forward
        if isinstance(module, MoE):
            numbers: dict[str, Number] = {"L": count, "E": module.num_experts}
            each = round_up(4 * module.num_experts, GRANULE)
            latex = r"<L> \cdot 512 \cdot \lceil \frac{4 \cdot <E>}{512} \rceil"
            yield f"router_correction_{kind}", count * each, latex, numbers


def _masks(plan: TrainingPlan, spec: ModelSpec, settings: Settings) -> Iterator[Constant]:
    """The masks that all layers read, one for each window: numbers to add for eager attention; for SDPA truth values, of
    those windows that the sequence fills. A checkpoint holds them, as its layer's arguments, until its backward."""
    until = "layers" if plan.recompute == "full" else "stack"
    tokens = plan.seq // plan.cp
    attends = any(isinstance(kind.mixer, Attention | LatentAttention) for kind in spec.layers.kinds)
    windows = sorted({*_windows(spec)} or {0}) if attends else []
    if settings.attention == "eager":
        numbers: dict[str, Number] = {"b": plan.sequences, "s": tokens}
        for window in windows:
            name = f"mask_{window}" if window else "mask"
            exact = settings.bytes * plan.sequences * tokens**2
            yield _constant(name, exact, rf"{settings.bytes} \cdot <b> \cdot <s>^{{2}}", numbers, True, until)
    elif settings.attention == "sdpa":
        for window in windows:
            if 0 < window <= settings.longest_masked:
                yield _constant(f"mask_{window}", tokens**2, "<s>^{2}", {"s": tokens}, False, until)


def _constant(name: str, exact: int, latex: str, numbers: dict[str, Number], each: bool, until: str) -> Constant:
    return Constant(rounded_leaf(name, exact, latex, numbers, PROGRAM), each, until)


@lru_cache(maxsize=256)
def _rotary_widths(spec: ModelSpec) -> tuple[int, ...]:
    found = set()
    for kind in spec.layers.kinds:
        if isinstance(kind.mixer, Attention) and kind.mixer.rotary:
            found.add(kind.mixer.rotary_dim or kind.mixer.head_dim)
        if isinstance(kind.mixer, LatentAttention):
            found.add(kind.mixer.qk_rope_head_dim)
    return tuple(sorted(found)) * model_class(spec.architecture).rotary_bases
