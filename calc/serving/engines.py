"""The table of engines: what each takes besides weights and cache, and how much cache fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from calc.breakdown import Component
from calc.hardware import Gpu
from calc.model.spec import ModelSpec
from calc.serving import mlx, sglang, tensorrt_llm, transformers_generate
from calc.serving.activations import activations
from calc.serving.cache import Cache
from calc.serving.capacity import Capacity, logical
from calc.serving.llama_cpp import buffers, llama_cpp, place
from calc.serving.plan import ServingPlan
from calc.serving.stages import Load, Parts, Placement
from calc.serving.vllm import profile, reserved, vllm
from calc.serving.weights import StoredWeights

_Pair = tuple[tuple[Component, ...], tuple[Component, ...]]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: `parts` gives the activations and what is reserved on a stage, `capacity` what the cache has room for, `place`
    where layers go when not in even shares."""

    name: str
    parts: Parts
    capacity: Callable[[ServingPlan, Gpu | None, Cache, tuple[Load, ...]], Capacity]
    place: Callable[[ModelSpec, ServingPlan, Gpu | None, StoredWeights, Cache], Placement] | None = None


def _ends(spec: ModelSpec, layers: range) -> tuple[bool, bool]:
    """Whether a stage with these layers is the first, and the last."""
    return layers.start == 0, layers.stop == spec.num_hidden_layers


def _logical(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range) -> _Pair:
    return activations(spec, plan, last=_ends(spec, layers)[1]), ()


def _vllm(spec: ModelSpec, plan: ServingPlan, gpu: Gpu | None, layers: range) -> _Pair:
    first, last = _ends(spec, layers)
    return profile(spec, plan, gpu, first=first, last=last), reserved(spec, plan, gpu, layers, last=last)


_TABLE = (
    Engine("logical", _logical, logical),
    Engine("vllm", _vllm, vllm),
    Engine("sglang", sglang.parts, sglang.sglang),
    Engine("tensorrt-llm", tensorrt_llm.parts, tensorrt_llm.tensorrt_llm),
    Engine("transformers", transformers_generate.parts, transformers_generate.transformers_generate),
    Engine("llama.cpp", buffers, llama_cpp, place),
    Engine("mlx", mlx.parts, mlx.mlx),
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in _TABLE}
