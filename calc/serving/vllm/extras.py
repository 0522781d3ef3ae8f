"""What adapters and drafts add to a rank of vLLM: slots for LoRA (SGLang's are the same), the weights of a draft, and its layers' cache."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.errors import InputError
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Split, Weight
from calc.serving.plan import ServingPlan
from calc.units import ceil_div

_URL = "https://github.com/vllm-project/vllm"
_LORA = {
    "vllm": ("vllm/lora/layers: a stack of max_loras pairs for each linear layer, at max_lora_rank, in 16 bits", _URL),
    "sglang": (
        "SGLang 0.5.23, srt/lora/mem_pool.py: max_loras_per_batch pairs for each linear layer, at max_lora_rank, in 16 bits",
        "https://github.com/sgl-project/sglang",
    ),
}
_EAGLE = (
    "EAGLE-3, arXiv 2503.01840: one layer of the target's shape, its input joined from three of the target's layers "
    "(vllm/model_executor/models/llama_eagle3.py)"
)
_MTP = "the checkpoint's own prediction layers, in 16 bits; embedding and head are the target's"


def lora_slots(spec: ModelSpec, plan: ServingPlan, layers: range) -> tuple[Component, ...]:
    """Buffers of `lora_slots` adapters on a stage; experts have none."""
    if not plan.lora_slots:
        return ()
    width = sum(
        _lora_width(weight, plan.tp)
        for layer in layers
        for part in spec.layers.kind_parts[spec.layers.pattern[layer]]
        if not part.expert and part.name != "router"
        for weight in part.weights
        if weight.matmul and len(weight.shape) == 2
    )
    numbers = {"n": plan.lora_slots, "r": plan.lora_rank, "w": width}
    source, url = _LORA[plan.engine]
    formula = Formula(r"2 \cdot <n> \cdot <r> \cdot <w>", source, url, ("w: inputs and outputs of all linear layers",))
    value = 2 * plan.lora_slots * plan.lora_rank * width
    return (Component("lora_slots", value, formula=formula, numbers=numbers),)


def _lora_width(weight: Weight, tp: int) -> int:
    """Input features of A and output features of B on one rank."""
    outputs, inputs = (dimension.size for dimension in weight.shape)
    if weight.split is Split.INPUT:
        return ceil_div(inputs, tp) + outputs
    return inputs + (ceil_div(outputs, tp) if weight.split is not Split.NONE else outputs)


def draft_layers(spec: ModelSpec, plan: ServingPlan) -> int:
    """Layers of the draft that keep a cache. InputError for MTP of a model without prediction layers."""
    if plan.draft == "eagle":
        return 1
    if plan.draft == "mtp":
        return len(_prediction(spec).stack)
    return 0


def _prediction(spec: ModelSpec) -> Tower:
    found = next((tower for tower in spec.towers if tower.name == "prediction"), None)
    if found is None:
        raise InputError.of("draft", "mtp", f"{spec.name} has no prediction layers; use eagle or ngram")
    return found


def draft_weights(spec: ModelSpec, plan: ServingPlan) -> tuple[Component, ...]:
    """The draft's weights on one rank; an n-gram draft has none."""
    if plan.draft == "eagle":
        layer = sum(part.parameters for part in spec.layers.kind_parts[spec.layers.pattern[-1]])
        parameters = layer + 3 * spec.hidden_size**2
        source = _EAGLE
    elif plan.draft == "mtp":
        tower = _prediction(spec)
        own = sum(
            count * sum(part.parameters for part in parts)
            for parts, count in zip(tower.stack.kind_parts, tower.stack.counts, strict=True)
        )
        parameters = own + sum(part.parameters for part in tower.parts)
        source = _MTP
    else:
        return ()
    numbers = {"P": parameters, "t": plan.tp}
    formula = Formula(r"2 \cdot \lceil \frac{<P>}{<t>} \rceil", source, _URL, ("split evenly by the ranks",))
    return (Component("draft_weights", 2 * ceil_div(parameters, plan.tp), formula=formula, numbers=numbers),)
