"""From a config to the observed bytes of its training step."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from calc.errors import InputError
from measure.trace.cuda import cuda_choices
from measure.trace.model import Stack, build, cut, find_stack, quiet, text_config, why_no_step
from measure.trace.options import TraceOptions
from measure.trace.result import TraceResult, by_phase, saved_rows
from measure.trace.step import Observed, run_steps
from measure.trace.timeline import STATES, Delta, Key, Peak, Unextendable, extend, peaks, states

_SHARED = {
    0: "data-parallel ranks: DistributedDataParallel's buckets do not trace; the ranks are as one alone",
    1: "rank 0, to which ZeroRedundancyOptimizer gives the largest tensor; DistributedDataParallel's buckets do not trace",
    3: "rank 0 of FSDP2, one group a layer and one of the rest; collectives copy nothing, whatever they are given",
}
_ASSUMPTIONS = (
    "labels are the inputs, no attention mask, no cache; only the loss is kept after forward; gradients are set to None before the step",
    "workspaces that a kernel allocates and frees inside one operation are not seen",
)


Progress = Callable[[str], None]


def traced(config: Mapping[str, Any], options: TraceOptions, progress: Progress) -> TraceResult:
    """See `measure.trace.trace_step`."""
    if options.zero == 1:  # which rank keeps a tensor's states follows from the sizes of all
        options = replace(options, layers=0)
    try:
        return _trace(config, options, progress)
    except Unextendable as reason:
        progress(f"running every layer: {reason}")
        return _trace(config, replace(options, layers=0), progress)


def _trace(config: Mapping[str, Any], options: TraceOptions, progress: Progress) -> TraceResult:
    with quiet(), cuda_choices():
        progress("building the model without memory")
        model = build(config, options)
        name = type(model).__name__
        stack = find_stack(model, options.layers, neighbours=options.zero == 3)
        progress(f"running two steps, {len(stack.run)} of {len(stack.kinds)} layers")
        cut(model, stack)
        seen = _run(model, stack, options)
    before = states(seen.before, stack)
    deltas = extend(seen.events, stack)
    after_forward, after_backward = states(seen.after_forward, stack), states(seen.after_backward, stack)
    _check(before, deltas, after_backward)
    highest = {"step": Peak(sum(after_backward.values()), after_backward), **by_phase(peaks(before, deltas))}
    peak = max(highest.values(), key=lambda found: found.nbytes)
    return TraceResult(
        parameters_bytes=_sum(before, "parameters"),
        gradients_bytes=_sum(after_backward, "gradients"),
        optimizer_bytes=_sum(before, "optimizer"),
        activations_bytes=sum(nbytes for key, nbytes in after_forward.items() if key.category not in STATES),
        phases={phase: highest[phase].nbytes for phase in ("forward", "backward", "step")},
        alive=peak.alive,
        saved=saved_rows(seen.after_forward, stack),
        layers=len(stack.kinds),
        layers_run=len(stack.run),
        witness=f"observed: {name}, transformers {transformers.__version__}, torch {torch.__version__}",
        assumptions=(*_ASSUMPTIONS, *_choices(model), *([_SHARED[options.zero]] if options.dp > 1 else [])),
    )


def _run(model: nn.Module, stack: Stack, options: TraceOptions) -> Observed:
    try:
        return run_steps(model, stack, options)
    except (InputError, Unextendable):
        raise
    except Exception as error:
        if os.environ.get("PLUMBLINE_DEBUG"):
            raise
        name = type(model).__name__
        if why := why_no_step(model):
            raise InputError(f"MODEL: {name} {why}: its step on text alone cannot be run", "MODEL") from None
        raise InputError(
            f"MODEL: the training step of {name} does not run with fake tensors: {error}", "MODEL"
        ) from None


def _choices(model: nn.Module) -> list[str]:
    """What transformers chose for this model, where that decides what is kept."""
    config = text_config(model)
    told = [f"attention: {config._attn_implementation}"]
    if any("Experts" in type(module).__name__ for module in model.modules()):
        told.append(f"experts: {config._experts_implementation}")
    kinds = " ".join([config.model_type, *(getattr(config, "layer_types", None) or ())])
    if any(word in kinds for word in ("linear_attention", "mamba", "rwkv")):
        told.append(
            "recurrent layers run transformers' own PyTorch code; with the kernels of mamba-ssm or flash-linear-attention less is kept"
        )
    return told


def _sum(held: Mapping[Key, int], category: str) -> int:
    return sum(nbytes for key, nbytes in held.items() if key.category == category)


def _check(before: Counter[Key], deltas: list[Delta], after_backward: Counter[Key]) -> None:
    """The laid-together timeline must end backward with what was seen there. Unextendable if it does not."""
    total = sum(before.values()) + sum(delta.nbytes for delta in deltas if delta.phase != "step")
    if total != sum(after_backward.values()):
        raise Unextendable(f"{total} bytes after backward, {sum(after_backward.values())} expected")
