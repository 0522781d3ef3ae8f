"""Traced steps: what `measure.trace.trace_step` saw, as recorded or traced again."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

from measure.trace import TraceOptions, trace_step
from tests.recorded.recording import Recording

TRACES = Recording("traces", ("measure.trace.run",), ("torch", "transformers"), again=6)
_PACKAGES = {"full": (), "lora": ("peft",), "dora": ("peft",), "qlora": ("peft", "bitsandbytes")}
_DEFAULTS = TraceOptions()


@dataclass(frozen=True, slots=True)
class Seen:
    """The bytes of a traced step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    phases: Mapping[str, int]
    peak_bytes: int
    peak_phase: str


def traced(name: str, config: Mapping[str, Any], options: TraceOptions) -> Seen:
    """The bytes of the step that `options` ask for. `name` says what `config` is."""
    return Seen(
        **TRACES.result(
            " ".join([name, *_changed(options)]),
            {"config": config, "options": asdict(options)},
            lambda: _trace(config, options),
            f"{options.method} {options.recipe}" + (f" zero {options.zero}" if options.dp > 1 else ""),
            _PACKAGES[options.method],
        )
    )


def _changed(options: TraceOptions) -> list[str]:
    values = ((each.name, getattr(options, each.name)) for each in fields(options))
    return [f"{name}={_text(value)}" for name, value in values if value != getattr(_DEFAULTS, name)]


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _trace(config: Mapping[str, Any], options: TraceOptions) -> dict[str, Any]:
    _few_objects_to_sweep()
    seen = trace_step(config, options)
    return {each.name: getattr(seen, each.name) for each in fields(Seen)} | {"phases": dict(seen.phases)}


@cache
def _few_objects_to_sweep() -> None:
    """A trace sweeps the garbage of each step: without the libraries' own objects that takes half as long."""
    import measure.trace.run  # noqa: F401

    gc.collect()
    gc.freeze()
