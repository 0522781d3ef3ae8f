"""What goes together of a training plan and a model: each refusal names the field, both values and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from calc.errors import InputError
from calc.model.feed_forward import MLP, MoE
from calc.model.mixers import Attention, CompressedAttention, LatentAttention, Recurrence
from calc.model.spec import Layer, ModelSpec
from calc.parameters import lora_parameters
from calc.training.model_classes import MODEL_CLASSES, model_class
from calc.training.plan import TrainingPlan
from calc.training.states.tensors import Lora, has_peft_targets, model_tensors


def check(plan: TrainingPlan, spec: ModelSpec) -> None:
    """InputError unless the layout fits the model: heads, widths, experts and layers divide as the plan asks."""
    for field, value, name, size in _divisions(plan, spec):
        if size % value:
            raise InputError(f"{field} ({value}) must divide {name} ({size})", field.partition(" ")[0])
    for kv in _kv_heads(spec):
        if kv % plan.tp and plan.tp % kv:
            raise InputError(f"tp ({plan.tp}) must divide num_key_value_heads ({kv}) or be a multiple of it", "tp")
    if plan.sharded_sequence and plan.seq % (plan.cp * plan.tp):
        raise InputError(
            f"cp * tp ({plan.cp} * {plan.tp}) must divide seq ({plan.seq}) with sequence parallelism", "seq"
        )
    layers = spec.num_hidden_layers
    if plan.pp * plan.virtual_stages > layers:
        product = f"pp * virtual_stages ({plan.pp} * {plan.virtual_stages})"
        raise InputError(f"{product} must be at most num_hidden_layers ({layers})", "pp")
    if plan.implementation == "liger" and model_class(spec.architecture).liger is None:
        known = ", ".join(name.removesuffix("ForCausalLM") for name, found in MODEL_CLASSES.items() if found.liger)
        raise InputError.of("implementation", "liger", f"it is not modelled for {spec.architecture}; it is for {known}")
    if plan.scores and (not spec.generates or any(kind.cross for kind in spec.layers.kinds)):
        instead = "also reads with an encoder" if spec.generates else "is an encoder, which generates nothing"
        raise InputError.of(
            "objective", plan.objective, f"it is modelled for decoders alone, and {spec.architecture} {instead}"
        )
    if plan.transformers and plan.attention == "flash" and model_class(spec.architecture).eager_only:
        raise InputError.of("attention", "flash", f"{spec.architecture} has eager attention alone; use eager")
    if plan.objective == "grpo" and not all(_generates_plainly(kind.mixer, plan.seq) for kind in spec.layers.kinds):
        raise InputError.of(
            "objective",
            "grpo",
            f"its rollout is modelled for keys and values of the whole sequence, which {spec.name} does not keep",
        )
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    if plan.implementation == "litgpt" and not all(
        isinstance(kind.mixer, Attention) and isinstance(kind.feed_forward, MLP) for kind in spec.layers.kinds
    ):
        raise InputError.of(
            "implementation", "litgpt", f"it is modelled for dense attention, which {spec.name} does not have alone"
        )
    if plan.implementation == "torchtune" and not all(map(_plain_decoder, spec.layers.kinds)):
        raise InputError.of(
            "implementation",
            "torchtune",
            f"it is modelled for dense decoders with gated MLPs and two norms a layer, which {spec.name} is not",
        )
    for module in plan.recompute_modules:
        if module in _MODULES and not any(map(_MODULES[module], spec.layers.kinds)):
            raise InputError.of("recompute_modules", module, f"no layer of {spec.name} has one")
    if plan.lora and not plan.lora.litgpt:
        _check_targets(plan.lora, spec)
    if plan.modules_to_save and spec.tied:
        raise InputError.of(
            "modules_to_save",
            ",".join(plan.modules_to_save),
            f"it is modelled for an embedding and a head apart, and {spec.name} ties them",
        )
    if plan.ep > 1 and not experts:
        raise InputError.of("ep", plan.ep, f"{spec.name} has no experts, so it must be 1")
    if plan.method == "qlora" and any(
        isinstance(kind.mixer, Recurrence | CompressedAttention) for kind in spec.layers.kinds
    ):
        raise InputError.of(
            "method", "qlora", f"it is not modelled for the recurrent or compressed layers of {spec.name}"
        )


_MODULES = {
    "mla_up_proj": lambda layer: isinstance(layer.mixer, LatentAttention),
    "mlp": lambda layer: isinstance(layer.feed_forward, MLP),
    "moe": lambda layer: isinstance(layer.feed_forward, MoE),
    "moe_act": lambda layer: isinstance(layer.feed_forward, MoE),
    "shared_experts": lambda layer: isinstance(layer.feed_forward, MoE) and layer.feed_forward.shared is not None,
}


def _plain_decoder(layer: Layer) -> bool:
    """Llama's kind of layer: attention without windows, a gated MLP, a norm before each."""
    mixer, module = layer.mixer, layer.feed_forward
    plain = isinstance(mixer, Attention) and not (mixer.window or mixer.chunk or mixer.softcap or mixer.gated)
    return plain and isinstance(module, MLP) and module.gated and len(layer.norms) == 2 and not layer.parallel


def _check_targets(lora: Lora, spec: ModelSpec) -> None:
    """InputError where the targets name no linear layer, or where peft adapts what the step's ledger does not hold adapters of."""
    if not lora.targets:
        if not has_peft_targets(spec):
            raise InputError(
                f"lora_targets: left out, and peft's own choice names no linear layer of {spec.name}; name the modules",
                "lora_targets",
            )
        return
    everything = lora.targets == ("all-linear",)
    if "all-linear" in lora.targets and not everything:
        raise InputError.of("lora_targets", ",".join(lora.targets), "'all-linear' stands alone, without other names")
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    if everything and experts and not model_class(spec.architecture).published_stacked:
        raise InputError(  # adapters of rank r · E on the stacked weights (peft 0.21)
            f"lora_targets: with 'all-linear' peft adapts the experts of {spec.name} too, which is not modelled; "
            "name the modules, such as q_proj,v_proj",
            "lora_targets",
        )
    if everything:
        return
    names = ",".join(lora.targets)
    lora_parameters(spec, lora.rank, names)  # refuses a name that no linear layer has
    if experts and _adapters_of_layers(lora, spec) != lora_parameters(
        replace(spec, towers=(), other=()), lora.rank, names
    ):
        raise InputError.of(
            "lora_targets",
            names,
            f"what peft adapts in {spec.name} by these names, such as its experts, is not modelled; "
            "name attention modules such as q_proj,v_proj",
        )


def _adapters_of_layers(lora: Lora, spec: ModelSpec) -> int:
    """Elements of the adapters A and B that the step's ledger holds."""
    kinds = model_tensors(spec, 1, 1, replace(lora, magnitude=False)).kinds
    adapters = [sum(tensor.elements for tensor in kind.tensors if tensor.adapter) for kind in kinds]
    return sum(size * count for size, count in zip(adapters, spec.layers.counts, strict=True))


def _generates_plainly(mixer: object, seq: int) -> bool:
    """Whether a layer's cache is the keys and values of all tokens, read by a fused kernel without a mask."""
    if not isinstance(mixer, Attention):
        return False
    limited = 0 < (mixer.window or mixer.chunk) < seq
    return not (limited or mixer.softcap or mixer.sinks or mixer.indexer)


def _kv_heads(spec: ModelSpec) -> Iterator[int]:
    for kind in spec.layers.kinds:
        if isinstance(kind.mixer, Attention):
            yield kind.mixer.num_key_value_heads


def _divisions(plan: TrainingPlan, spec: ModelSpec) -> Iterator[tuple[str, int, str, int]]:
    for kind in spec.layers.kinds:
        if isinstance(kind.mixer, Attention | LatentAttention):
            yield "tp", plan.tp, "num_attention_heads", kind.mixer.num_attention_heads
        if isinstance(kind.feed_forward, MLP):
            yield "tp", plan.tp, "intermediate_size", kind.feed_forward.intermediate_size
        if isinstance(kind.feed_forward, MoE):
            if not plan.ep_over_tp:
                yield "tp", plan.tp, "moe_intermediate_size", kind.feed_forward.expert.intermediate_size
            name = "ep * tp" if plan.ep_over_tp else "ep"
            yield name, plan.expert_ranks, "num_experts", kind.feed_forward.num_experts
