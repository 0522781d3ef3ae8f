"""What a rank of vLLM takes besides the weights, the profile's peak and the cache."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.model.feed_forward import MoE
from calc.model.mixers import Attention, LatentAttention
from calc.model.spec import ModelSpec
from calc.serving.plan import ServingPlan
from calc.serving.vllm.extras import draft_weights, lora_slots
from calc.serving.vllm.graphs import graphs
from calc.serving.vllm.step import step_limits
from calc.serving.vllm.versions import (
    NON_TORCH_ALONE,
    NON_TORCH_LINKED,
    NON_TORCH_PCIE,
    NON_TORCH_STAGE,
    SAMPLER_STATE,
    version,
)
from calc.units import GiB, ceil_div, round_up

_URL = "https://github.com/vllm-project/vllm"


def reserved(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range, *, last: bool
) -> tuple[Component, ...]:
    """What a rank takes besides the weights, the profile's peak and the cache: outside torch, tables and states that stay, graphs."""
    if plan.overhead_gib is not None:
        value = int(plan.overhead_gib * GiB)
        formula = Formula("<o>", "given by the plan")
        return (Component("overhead", value, formula=formula, numbers={"o": value}),)
    number = version(plan.engine_version)
    parts = [_non_torch(plan, gpu), *_rotary(spec), *_padding(spec, plan, layers)]
    parts += [*lora_slots(spec, plan, layers), *(draft_weights(spec, plan) if last else ())]
    bits = int(SAMPLER_STATE.at(number).value)
    if bits and last and spec.has_head:
        sequences = step_limits(plan, gpu)[1]
        formula = Formula(
            rf"\lceil \frac{{{bits} \cdot <B> \cdot <V>}}{{8}} \rceil", SAMPLER_STATE.at(number).source, _URL
        )
        numbers = {"B": sequences, "V": spec.vocab_size}
        value = ceil_div(bits * sequences * spec.vocab_size, 8)
        parts.append(Component("sampler_state", value, formula=formula, numbers=numbers))
    return (*parts, *graphs(plan, gpu, len(layers)))


def _non_torch(plan: ServingPlan, gpu: Gpu | None) -> Component:
    """NCCL, custom all-reduce, kernels' code and the like."""
    number = version(plan.engine_version)
    topic = NON_TORCH_STAGE if plan.pp > 1 else NON_TORCH_ALONE
    if plan.tp > 1:
        topic = NON_TORCH_LINKED if gpu is None or _has_link(gpu) else NON_TORCH_PCIE
    change = topic.at(number)
    value = int(plan.non_torch_gib * GiB) if plan.non_torch_gib is not None else int(change.value)
    source = change.source if plan.non_torch_gib is None else "given by the plan"
    return Component("non_torch", value, formula=Formula("<o>", source, _URL), numbers={"o": value})


def _padding(spec: ModelSpec, plan: ServingPlan, layers: range) -> tuple[Component, ...]:
    """What padding adds to experts in MXFP4: the hidden size to a multiple of 256, in the values and not in their scales."""
    padded = round_up(spec.hidden_size, 256) - spec.hidden_size
    if plan.weights != "mxfp4" or not padded:
        return ()
    rows = sum(
        (2 if moe.expert.gated else 1) * expert_share(moe.num_experts, plan) * moe.expert.intermediate_size
        + expert_share(moe.num_experts, plan) * moe.expert.intermediate_size
        for moe in _experts(spec, layers)
    )
    value = ceil_div(padded * rows, 2 * (plan.tp if plan.ep == 1 else 1))
    source = "vllm/model_executor/layers/quantization/mxfp4.py, create_weights: hidden_size rounded up to 256"
    formula = Formula("<o>", source, _URL, ("the log of gpt-oss says 0.59 GiB for 20B and 3.6 for 120B",))
    return (Component("expert_padding", value, formula=formula, numbers={"o": value}),)


def _experts(spec: ModelSpec, layers: range) -> list[MoE]:
    kinds = (spec.layers.kinds[spec.layers.pattern[layer]].feed_forward for layer in layers)
    return [found for found in kinds if isinstance(found, MoE)]


def expert_share(experts: int, plan: ServingPlan) -> int:
    """Experts that one rank holds."""
    return ceil_div(experts, plan.ep)


def _has_link(gpu: Gpu) -> bool:
    """Whether ranks talk over NVLink (or another fast link) rather than PCIe: data-centre cards with a stated link."""
    return bool(gpu.link_bandwidth and gpu.link_bandwidth > (gpu.pcie_bandwidth or 0) * 2)


def _rotary(spec: ModelSpec) -> tuple[Component, ...]:
    """The table of cosines and sines, which the log counts with the weights."""
    widths = {
        (mixer.rotary_dim or mixer.head_dim) if isinstance(mixer, Attention) else mixer.qk_rope_head_dim
        for kind in spec.layers.kinds
        for mixer in kind.mixers
        if isinstance(mixer, LatentAttention) or (isinstance(mixer, Attention) and mixer.rotary)
    }
    if not widths or not spec.max_position_embeddings:
        return ()
    numbers = {"s_{max}": spec.max_position_embeddings, "d": sum(widths)}
    formula = Formula(r"<s_{max}> \cdot <d> \cdot 2", "vllm/model_executor/layers/rotary_embedding/base.py", _URL)
    return (
        Component("rotary_table", 2 * spec.max_position_embeddings * sum(widths), formula=formula, numbers=numbers),
    )
