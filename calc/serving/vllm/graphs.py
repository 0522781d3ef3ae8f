"""The memory of vLLM's CUDA graphs: one graph a captured size, in which every layer has its kernels."""

from __future__ import annotations

from functools import cache

from calc.breakdown import Component, Formula
from calc.hardware import Gpu
from calc.serving.plan import ServingPlan
from calc.serving.vllm.step import step_limits
from calc.serving.vllm.versions import GRAPH_FULL, GRAPH_PIECEWISE, GRAPHS_COUNTED, version
from calc.units import GiB

_URL = "https://github.com/vllm-project/vllm"
_LARGEST = 512


@cache
def captured_sizes(most: int) -> tuple[int, ...]:
    """The sizes that are captured up to `most`: 1, 2, 4, then every 8 below 256 and every 16 from there (vllm/config/vllm.py)."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16))
    return tuple(size for size in sizes if size <= most)


def graphs(plan: ServingPlan, gpu: Gpu | None, layers: int) -> tuple[Component, ...]:
    """The graphs of a stage with so many layers, where its version takes them from the cache; () where they come on top."""
    number = version(plan.engine_version)
    if plan.enforce_eager or not GRAPHS_COUNTED.at(number).value:
        return ()
    return graph_memory(plan, gpu, layers)


def graph_memory(plan: ServingPlan, gpu: Gpu | None, layers: int) -> tuple[Component, ...]:
    """The graphs themselves, whatever they are taken from; an estimate from logs, good to about a third."""
    if plan.cuda_graph_gib is not None:
        value = int(plan.cuda_graph_gib * GiB)
        return (Component("cuda_graphs", value, formula=Formula("<o>", "given by the plan"), numbers={"o": value}),)
    number = version(plan.engine_version)
    tokens, sequences = step_limits(plan, gpu)
    piecewise = len(captured_sizes(min(2 * sequences, _LARGEST, tokens)))
    full = len(captured_sizes(min(sequences, 256 if number < (0, 8) else _LARGEST, tokens)))
    full = min(full, len(captured_sizes(256)))
    parts = []
    for topic, count in ((GRAPH_PIECEWISE, piecewise), (GRAPH_FULL, full)):
        change = topic.at(number)
        if change.value:
            each = int(change.value)
            formula = Formula(
                r"<n> \cdot (<l> + 1) \cdot <g>", change.source, _URL, ("an estimate, good to about a third",)
            )
            numbers = {"n": count, "l": layers, "g": each}
            parts.append(Component(topic.name, count * (layers + 1) * each, formula=formula, numbers=numbers))
    return tuple(parts)
