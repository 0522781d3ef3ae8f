"""From a config to the observed bytes of its training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from measure.trace.cuda import cuda_choices
from measure.trace.model import build, cut, find_stack, quiet
from measure.trace.options import TraceOptions
from measure.trace.result import STATES, TraceResult, by_phase, saved_rows
from measure.trace.step import run_steps
from measure.trace.timeline import Delta, Key, Unextendable, extend, peaks, states

_ASSUMPTIONS = (
    "labels are the inputs, no attention mask, no cache; only the loss is kept after forward; gradients are set to None before the step",
    "workspaces that a kernel allocates and frees inside one operation are not seen",
)


def trace_step(config: Mapping[str, Any], options: TraceOptions) -> TraceResult:
    """Run two training steps of the config's model with fake tensors and report the second, in bytes of one device.

    Layers alike are run a few times and laid together to the whole; a model whose layers cannot be is run whole.
    InputError when transformers or torch cannot build or run what is asked.
    """
    try:
        return _trace(config, options)
    except Unextendable:
        return _trace(config, replace(options, layers=0))


def _trace(config: Mapping[str, Any], options: TraceOptions) -> TraceResult:
    with quiet(), cuda_choices():
        model = build(config, options)
        stack = find_stack(model, options.layers)
        cut(model, stack)
        seen = run_steps(model, stack, options)
    before = states(seen.before, stack)
    deltas = extend(seen.events, stack)
    _check(before, deltas, states(seen.after_backward, stack))
    highest = by_phase(peaks(before, deltas))
    after_forward, after_backward = states(seen.after_forward, stack), states(seen.after_backward, stack)
    peak = max(highest.values(), key=lambda found: found.nbytes)
    return TraceResult(
        parameters_bytes=_sum(before, "parameters"),
        gradients_bytes=_sum(after_backward, "gradients"),
        optimizer_bytes=_sum(before, "optimizer"),
        activations_bytes=sum(nbytes for (category, _), nbytes in after_forward.items() if category not in STATES),
        phases={phase: found.nbytes for phase, found in highest.items()},
        alive=peak.alive,
        saved=saved_rows(seen.after_forward, stack),
        layers=len(stack.kinds),
        layers_run=len(stack.run),
        assumptions=_ASSUMPTIONS,
    )


def _sum(held: Mapping[Key, int], category: str) -> int:
    return sum(nbytes for (kind, _), nbytes in held.items() if kind == category)


def _check(before: Counter[Key], deltas: list[Delta], after_backward: Counter[Key]) -> None:
    """The laid-together timeline must end backward with what was seen there. Unextendable if it does not."""
    total = sum(before.values()) + sum(delta.nbytes for delta in deltas if delta.phase != "step")
    if total != sum(after_backward.values()):
        raise Unextendable(f"{total} bytes after backward, {sum(after_backward.values())} expected")
