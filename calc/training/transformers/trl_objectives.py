"""What preference and reinforcement learning run in addition to the policy's own step: a reference model, and the rollout.

TRL 1.16's trainers: DPO runs the policy over chosen and rejected answers, then the reference without gradients, while the policy's
activations wait. GRPO first generates the completions of a whole optimizer step with transformers' `generate`, then scores
them with the reference where there is one, and only then runs the policy's forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from calc.breakdown import Component, Number
from calc.model.spec import ModelSpec
from calc.training.autograd.blocks import Block, BlockBytes, Sizes, block_bytes
from calc.training.autograd.builder import Settings
from calc.training.autograd.leaves import Source, block_segment, rounded_leaf
from calc.training.autograd.segments import Constant, Segment
from calc.training.pipeline_stages import Stage
from calc.training.plan import TrainingPlan
from calc.training.states.sharding import GRANULE, Placed
from calc.training.states.tensors import Tensors, kind_path
from calc.training.transformers.decoder import embedding_block, end_block, layer_block
from calc.training.transformers.grpo_rollout import rollout
from calc.training.transformers.stage import hf_constants, scored_by, settings_of

DPO = Source(
    "TRL 1.16, trl/trainer/dpo_trainer.py", "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/dpo_trainer.py"
)
GRPO = Source(
    "TRL 1.16, trl/trainer/grpo_trainer.py",
    "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_trainer.py",
)
_NOTHING = Tensors((), ())


def reference_groups(groups: tuple[Placed, ...]) -> tuple[Placed, ...]:
    """The policy's tensors once more, frozen."""
    return tuple(
        (Tensors(("reference", *found.path), tuple(replace(tensor, frozen=True) for tensor in found.tensors)), count)
        for found, count in groups
    )


def _frozen_blocks(
    settings: Settings, spec: ModelSpec, stage: Stage, end: Block
) -> Iterator[tuple[tuple[str, ...], Block]]:
    """The blocks of a pass that keeps nothing, each kind once."""
    yield ("embedding",), embedding_block(spec, settings)
    for kind in dict.fromkeys(stage.layers):
        path = kind_path(spec.layers, kind)
        yield path, layer_block(spec.layers.kinds[kind], path, settings, False, False, settings.bytes)
    yield ("end",), end


def _frozen(plan: TrainingPlan, spec: ModelSpec) -> Settings:
    return replace(settings_of(plan, spec), lora=None, frozen=True, dropout=())


def reference_pass(plan: TrainingPlan, spec: ModelSpec, stage: Stage, path: tuple[str, ...]) -> Segment:
    """The reference over the sequences of a micro-batch: its highest point, and nothing kept."""
    settings, sizes = _frozen(plan, spec), Sizes(plan.sequences, plan.seq, GRANULE)
    scored = scored_by(plan, ("log_probabilities",), True)
    end = end_block(spec, settings, plan.head_loss, plan.sequences > 1, settings.bytes, False, (1, 1), scored)
    embedded = [_embedded(plan, spec)] if len(stage.layers) > 1 else []
    in_stack = (*embedded, *_tables(plan, spec, stage))

    def allocated(item: tuple[tuple[str, ...], Block]) -> tuple[Component, ...]:
        return in_stack if item[0][0] == "layers" else ()

    def highest(item: tuple[tuple[str, ...], Block]) -> int:
        return block_bytes(item[1], sizes).forward_peak + sum(int(leaf.total) for leaf in allocated(item))

    found = max(_frozen_blocks(settings, spec, stage, end), key=highest)
    name, block = found
    trainer = (*allocated(found), *(_outputs(plan) if plan.objective == "dpo" else ()))
    segment = block_segment((*path, *name), block, sizes, _NOTHING, plan, _source(plan))
    peak = segment.bytes.forward_peak + sum(int(leaf.total) for leaf in trainer)

    def live_parts(phase: str, accumulating: bool) -> tuple[Component, ...]:
        return (*segment.live_parts("forward", accumulating), *trainer)

    return replace(segment, bytes=_only_forward(peak), keeps_input=False, kept=lambda: (), live_parts=live_parts)


def _only_forward(peak: int) -> BlockBytes:
    return BlockBytes(0, peak, 0, 0, 0, 0, 0, 0, 0, 0)


def _embedded(plan: TrainingPlan, spec: ModelSpec) -> Component:
    """What the embedding gave: the model's own forward holds it until its last layer has run."""
    numbers: dict[str, Number] = {
        "w": settings_of(plan, spec).bytes,
        "B": plan.sequences,
        "s": plan.seq,
        "h": spec.hidden_size,
    }
    size = int(numbers["w"]) * plan.sequences * plan.seq * spec.hidden_size
    return rounded_leaf("embedded", size, r"<w> \cdot <B> \cdot <s> \cdot <h>", numbers, _source(plan))


def _source(plan: TrainingPlan) -> Source:
    return DPO if plan.objective == "dpo" else GRPO


def _tables(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> list[Component]:
    """The reference's own rotary tables, which its layers read."""
    return [c.leaf for c in hf_constants(plan, spec, stage) if c.until == "layers" and c.leaf.name != "position_ids"]


def _outputs(plan: TrainingPlan) -> list[Component]:
    """What the trainer holds of the policy's pass while the reference runs: its head's outputs, and the labels."""
    numbers: dict[str, Number] = {"B": plan.sequences, "s": plan.seq}
    positions = plan.sequences * (plan.seq - 1)
    latex = r"<B> \cdot (<s> - 1)"
    wide = [
        rounded_leaf(name, 4 * positions, rf"4 \cdot {latex}", numbers, DPO)
        for name in ("log_probabilities", "entropy", "mean_logits")
    ]
    labels = rounded_leaf("labels", 8 * plan.sequences * plan.seq, r"8 \cdot <B> \cdot <s>", numbers, DPO)
    return [*wide, rounded_leaf("is_largest", positions, latex, numbers, DPO), labels]


def trainer_constants(
    plan: TrainingPlan, spec: ModelSpec, stage: Stage, segments: tuple[Segment, ...]
) -> list[Constant]:
    """What both trainers hold besides the policy: the masks of the batch, what its embedding gave, the reference's own buffers."""
    numbers: dict[str, Number] = {"B": plan.sequences, "s": plan.seq}
    size = 8 * plan.sequences * plan.seq
    masks = [
        rounded_leaf(name, size, r"8 \cdot <B> \cdot <s>", numbers, _source(plan))
        for name in ("attention_mask", "completion_mask")
    ]
    made = [Constant(leaf, True, "step") for leaf in masks]
    if not segments[1].keeps_input:
        made.append(Constant(_embedded(plan, spec), True, "stack"))
    if plan.holds_reference:
        for constant in hf_constants(plan, spec, stage):
            if constant.until == "step" and not constant.each:
                leaf = replace(constant.leaf, name=f"reference_{constant.leaf.name}")
                made.append(Constant(leaf, False, "step"))
    return made


def passes(plan: TrainingPlan, spec: ModelSpec, stage: Stage) -> tuple[Segment, ...]:
    """Phases of their own, before the policy's forward: by their paths' first names."""
    if plan.objective != "grpo":
        return ()
    parts = rollout(plan, spec, stage)
    peak = sum(int(part.total) for part in parts)
    generating = Segment(
        ("rollout",), _only_forward(peak), _NOTHING, False, lambda: (), lambda phase, accumulating: parts
    )
    return (generating, *([reference_pass(plan, spec, stage, ("reference",))] if plan.runs_reference else []))
