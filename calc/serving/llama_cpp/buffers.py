"""llama.cpp's compute buffer."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving.plan import ServingPlan


def buffers(
    spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range
) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The compute buffer of a device, and nothing reserved."""
    return (_llama_cpp_buffer(spec, plan),), ()


def _llama_cpp_buffer(spec: ModelSpec, plan: ServingPlan) -> Component:
    """llama.cpp's compute buffer, which the logits of a micro-batch decide; an approximation."""
    formula = Formula(
        r"<n_u> \cdot <V> \cdot 4",
        "llama.cpp: fp32 logits of a micro-batch, the widest tensor of its graph",
        "https://github.com/ggml-org/llama.cpp",
        ("an approximation: attention without flash adds its scores",),
    )
    numbers = {"n_u": plan.ubatch, "V": spec.vocab_size}
    return Component("compute_buffer", 4 * plan.ubatch * spec.vocab_size, formula=formula, numbers=numbers)
