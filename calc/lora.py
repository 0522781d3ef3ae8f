"""How many parameters LoRA trains: the adapters that peft puts on a model's linear layers, and on experts in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from calc.errors import InputError
from calc.model.families import FAMILIES
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec

# peft 0.21, utils/transformers_weight_conversion.py: where transformers 5 holds experts in two tensors, peft still takes the names
# of their three projections, by the style of the class. (gate, up, down); the router is "gate" in both.
_EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2"), "qwen2_moe": ("gate_proj", "up_proj", "down_proj")}
_STYLES = {"mixtral": "mixtral", "minimax": "mixtral", "minimax_m2": "mixtral"} | dict.fromkeys(
    """afmoe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe glm4_moe glm4_moe_lite glm_moe_dsa glm4v_moe
    beam solar_open mellum qwen3_moe qwen3_next hunyuan_v1_moe flex_olmo olmoe sarvam_mla exaone_moe cohere2_moe""".split(),
    "qwen2_moe",
)
# Where peft knows no names, the experts get no adapter, and a router only where it is a linear layer: the classes where that is known.
_OTHERS = frozenset(
    """aria axk1 bailing_hybrid dbrx deepseek_v4 flint gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hy_v3 jamba
    kimi_k25 kimi_linear kolibri1 laguna lara_mini lfm2_moe llama4 llava mimo_v2_flash minimax_m3_vl qwen2_moe qwen3_5_moe
    qwen3_vl_moe zaya""".split()
)
_MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}  # peft 0.21, tuners/tuners_utils.py


def lora_parameters(spec: ModelSpec, rank: int, targets: str = "all-linear") -> int:
    """Trainable parameters of LoRA as peft 0.21 makes them: r (in + out) for each linear layer of that name, towers included; parts
    of a fused projection share one adapter, and "all-linear" leaves the head out.

    Experts in one tensor get adapters of rank r for each expert where peft knows the class (`_STYLES`): 2 r E on gate and up, which
    are one tensor, r E on down, r on the router. In those classes a target of their names means the experts, and no linear
    layer of the same name. InputError when a target names nothing, or gate without up.
    """
    if rank < 1:
        raise InputError.of("lora_rank", rank, "it must be a whole number of at least 1")
    wanted = None if targets == "all-linear" else {name.strip() for name in targets.split(",") if name.strip()}
    if wanted is not None and not wanted:
        raise InputError.of("lora_targets", targets, 'it must be "all-linear" or module names with commas')
    _refuse_what_peft_refuses(spec, wanted)
    names = expert_names(spec)
    taken = {*names, "gate"} if names else set()
    found: set[str] = set(taken)
    total = _experts(spec, rank, names, wanted)
    linear_names = {one.module for one in _modules(spec) if not one.convolution}
    for one in _modules(spec):
        if one.module in taken:
            continue
        found.add(one.module)
        # a class whose experts are renamed is searched by names, which a convolution may share with a linear layer
        all_linear = one.module in linear_names if names else not one.convolution
        if all_linear if wanted is None else one.module in wanted:
            total += one.copies * rank * (one.output + one.inputs)
    if wanted is not None and not wanted <= found:
        missing = ", ".join(sorted(wanted - found))
        raise InputError.of("lora_targets", missing, f"the linear layers of this model are {', '.join(sorted(found))}")
    return total


def _refuse_what_peft_refuses(spec: ModelSpec, wanted: set[str] | None) -> None:
    """peft raises on the last projection of these classes' Mamba layers: their kernels read its weight past the adapter."""
    if _model_type(spec) in _MAMBA and (wanted is None or "out_proj" in wanted):
        given = "all-linear" if wanted is None else "out_proj"
        raise InputError.of(
            "lora_targets", given, f"peft puts no adapter on out_proj of {_model_type(spec)}; name others"
        )
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    unknown = experts and _model_type(spec) not in _OTHERS | _STYLES.keys()
    if wanted is None and (unknown or any(kind.reused for kind in spec.layers.kinds)):
        kept = f"what peft adapts in {_model_type(spec)} is not known here; name modules"
        raise InputError.of("lora_targets", "all-linear", kept)


def _model_type(spec: ModelSpec) -> str:
    return FAMILIES[spec.architecture].module if spec.architecture in FAMILIES else ""


def expert_names(spec: ModelSpec) -> tuple[str, ...]:
    """The names by which peft takes the stacked experts of this class: gate, up, down; () where it does not."""
    style = _STYLES.get(_model_type(spec))
    return _EXPERT_NAMES[style] if style else ()


def _experts(spec: ModelSpec, rank: int, names: tuple[str, ...], wanted: set[str] | None) -> int:
    """The adapters on experts in one tensor and on their routers."""
    if not names:
        return 0
    gate, up, down = (wanted is None or name in wanted for name in names)
    if gate != up:
        one, other = (names[0], names[1]) if gate else (names[1], names[0])
        raise InputError.of("lora_targets", one, f"{other} must be named with it: one tensor holds both")
    total = 0
    for kind, count in zip(spec.layers.kinds, spec.layers.counts, strict=True):
        module = kind.feed_forward
        if isinstance(module, MoE):
            experts, expert = module.num_experts, module.expert
            sides = expert.hidden_size + expert.intermediate_size
            total += count * rank * experts * (2 * (sides + expert.intermediate_size) if gate else 0)
            total += count * rank * experts * (sides if down else 0)
            total += count * rank * (module.hidden_size + experts if wanted is None or "gate" in wanted else 0)
    return total


@dataclass(frozen=True, slots=True)
class _Module:
    """A linear layer, or a convolution over patches, with its features; `copies` of it."""

    module: str
    convolution: bool
    output: int
    inputs: int
    copies: int


def _modules(spec: ModelSpec) -> Iterator[_Module]:
    """Those of the layers, of the towers that the class builds, and of what else is there; the parts of a fused one are joined."""
    groups = [*zip(spec.layers.kind_parts, spec.layers.counts, strict=True), (spec.other, 1)]
    for tower in spec.towers:
        if tower.in_total:
            groups += [*zip(tower.stack.kind_parts, tower.stack.counts, strict=True), (tower.parts, 1)]
    for part, count in ((part, count) for parts, count in groups for part in parts if not part.expert):
        made: dict[tuple[str, int], _Module] = {}  # parts of one projection read the same; BERT's two "dense" do not
        for weight in part.weights:
            if weight.module and weight.matmul:
                output, inputs = (dimension.size for dimension in weight.shape)
                key = (weight.module, inputs)
                output += made[key].output if key in made else 0
                made[key] = _Module(weight.module, weight.convolution, output, inputs, count * part.copies)
        yield from made.values()
