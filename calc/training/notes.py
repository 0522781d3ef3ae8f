"""What an answer assumes: what the config left open, and what holds for the recipe, the layout and the program."""

from __future__ import annotations

from collections.abc import Iterator

from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.training.autograd.adapters import VARIANTS
from calc.training.overhead import SOURCES
from calc.training.plan import TrainingPlan
from calc.training.programs import program_of
from calc.training.states.base_formats import BASE_FORMATS
from calc.training.states.nf4_loading import NOTES as QUANTISED
from calc.training.states.offload import NOTES as OFFLOAD
from calc.training.states.recipes import OPTIMIZERS, RECIPES
from calc.training.states.sharding import StateKey
from calc.training.states.tensors import idle_towers

# The number format that a recipe's matmuls must have; the others run in fp16 or fp32 just as well.
_FORMATS = {
    "pure-bf16": "bf16",
    "megatron-bf16": "bf16",
    "megatron-precision-aware": "bf16",
    "fsdp-bf16": "bf16",
    "fp8": "fp8",
}


def assumptions(plan: TrainingPlan, spec: ModelSpec, gpu: Gpu | None) -> tuple[str, ...]:
    """Every assumption once, those of the config first."""
    missing = gpu.lacks(_FORMATS.get(plan.recipe, "")) if gpu else None
    lacking = [f"recipe {plan.recipe}: {missing}"] if missing else []
    return tuple(dict.fromkeys((*spec.assumptions, *_assumptions(plan, spec), *lacking, *SOURCES.values())))


def _assumptions(plan: TrainingPlan, spec: ModelSpec) -> list[str]:
    labels = (
        "labels are the inputs"
        if spec.has_head
        else "no head and no labels: the step on text ends at the last hidden state"
    )
    notes = [f"{labels}, no attention mask is given, gradients are set to None, and the optimizer has its state"]
    notes += [note for note in (RECIPES[plan.recipe].note, OPTIMIZERS[plan.optimizer].note) if note]
    notes += OFFLOAD[plan.offload]
    if plan.method == "qlora":
        notes += (f"qlora: the linear layers of the stack are {BASE_FORMATS[plan.quantization].note}", *QUANTISED)
    notes += VARIANTS if plan.lora else ()
    notes += spec.beyond_positions("seq", plan.seq)
    idle = idle_towers(spec)
    if idle:
        notes.append(
            f"text-only step: {', '.join(idle)} hold weights alone, no gradients, optimizer states or activations"
        )
    others = [tower.name for tower in spec.towers if tower.in_total and tower.name not in idle]
    if others:
        notes.append(f"{', '.join(others)}: states are counted, activations are not")
    notes += program_of(plan).notes(plan, spec)
    notes += [f"activations are an estimate: {text}" for text in spec.estimates]
    notes += _sharding(plan, spec)
    if plan.scores:
        notes += _scoring(plan)
    if plan.expert_ranks > 1:
        notes.append("experts are balanced: every rank serves as many tokens as it holds")
    return notes


def _sharding(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """What FSDP2 does that more ranks do not better, and what its recipe counts without it."""
    if RECIPES[plan.recipe].gathered and plan.zero < 3:
        yield f"recipe {plan.recipe}: FSDP2 is zero 3; with zero {plan.zero} no 16-bit copy of the fp32 weights is counted"
    experts = {kind.feed_forward.num_experts for kind in spec.layers.kinds if isinstance(kind.feed_forward, MoE)}
    for rows in sorted(count // plan.expert_ranks for count in experts):
        if StateKey.of(plan).rows and rows < plan.expert_shards and not StateKey.of(plan).experts_inside:
            yield (
                f"zero 3: FSDP2 shards stacked experts by whole experts, so that {rows} over {plan.expert_shards} ranks are padded to one "
                "each: more ranks hold no fewer, and gather more padding"
            )


def _scoring(plan: TrainingPlan) -> Iterator[str]:
    """What preference and reinforcement learning take for granted."""
    yield f"{plan.objective}: sequences of equal length, without padding; {plan.prompt_tokens} of {plan.seq} tokens are the prompt"
    if plan.holds_reference:
        yield "the reference model has the policy's number format, as TRL loads it, and lies whole on each device"
    elif plan.runs_reference:
        yield "the reference is the base model without its adapters: no second copy"
    if plan.objective == "grpo":
        yield (
            f"transformers generates all {plan.generated:,} completions of an optimizer step at once on each device, in groups of "
            "num_generations; with vLLM on the same GPU its share comes on top, and on other GPUs there is no rollout here"
        )
