"""What a log says against what is computed for the plan that it states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from calc.breakdown import Breakdown, Component
from calc.catalogue import catalogue
from calc.errors import InputError
from calc.hardware import Gpu, custom_gpu
from calc.model.spec import ModelSpec
from calc.serving.answer import ServingAnswer, serve
from calc.serving.logs.reader import LogFacts
from calc.serving.plan import ServingPlan
from calc.units import GiB

_ENGINES = {"ollama": "llama.cpp"}  # Ollama runs llama.cpp's kernels
_QUANTIZATION = {
    "fp8": "fp8",
    "gptq": "gptq-int4",
    "gptq_marlin": "gptq-int4",
    "awq": "awq-int4",
    "awq_marlin": "awq-int4",
    "bitsandbytes": "nf4",
    "mxfp4": "mxfp4",
    "modelopt_fp4": "nvfp4",
    "F16": "gguf-F16",
    "Q8_0": "gguf-Q8_0",
    "Q6_K": "gguf-Q6_K",
    "Q4_K": "gguf-Q4_K_M",
    "Q5_K": "gguf-Q5_K_M",
    "Q4_0": "gguf-Q4_0",
}
_CONSTANTS = {"activation": "activation_gib", "non_torch": "non_torch_gib", "graphs": "cuda_graph_gib"}


@dataclass(frozen=True, slots=True)
class LogRow:
    """One quantity: bytes or a count as the log says and as computed; `line` is the log's. None where a side lacks it."""

    quantity: str
    logged: float | None
    predicted: float | None
    unit: str
    line: int | None

    @property
    def residual(self) -> float | None:
        """Logged minus predicted."""
        return None if self.logged is None or self.predicted is None else self.logged - self.predicted

    def as_json(self) -> dict[str, Any]:
        error = self.residual / self.logged if self.residual is not None and self.logged else None
        return {
            "quantity": self.quantity,
            "logged": self.logged,
            "predicted": self.predicted,
            "residual": self.residual,
            "relative_error": error,
            "unit": self.unit,
            "line": self.line,
        }


@dataclass(frozen=True, slots=True)
class LogAnswer:
    """The rows, the plan that the log states, and this machine's constants as fields of a plan."""

    facts: LogFacts
    plan: ServingPlan
    model: str
    rows: tuple[LogRow, ...]
    constants: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def breakdown(self) -> Breakdown:
        """The logged bytes as a tree."""
        parts = (Component(row.quantity, int(row.logged or 0)) for row in self.rows if row.unit == "bytes")
        return Breakdown(Component("log", children=tuple(parts)), "bytes")

    def as_json(self) -> dict[str, Any]:
        return {
            "engine": self.facts.engine,
            "engine_version": self.facts.words.get("version"),
            "model": self.model,
            "plan": self.plan.model_dump(exclude_unset=True),
            "rows": [row.as_json() for row in self.rows],
            "constants": dict(self.constants),
            "notes": list(self.notes),
        }


def compared(facts: LogFacts, spec: ModelSpec | None, given: Mapping[str, Any], gpu: Gpu | None = None) -> LogAnswer:
    """The log against the answer of `serve`; what the plan's fields say in `given` wins over the log. Without a model only the log."""
    plan = ServingPlan.model_validate(_stated(facts) | dict(given))
    total = facts.bytes.get("total")
    card = custom_gpu(memory_gib=total / GiB, base=gpu) if total else gpu
    notes = []
    answer = None
    if spec is None:
        notes.append(
            f"name the model with --model to see what is computed; the log says {facts.words.get('model', 'nothing')}"
        )
    else:
        answer = serve(spec, plan, card)
        notes += answer.notes
    if card is None and spec is not None:
        notes.append("the log does not say the card's memory: name it with --gpu to have the budget from scratch")
    constants = {
        field: round(facts.bytes[name] / GiB, 4) for name, field in _CONSTANTS.items() if facts.bytes.get(name, -1) >= 0
    }
    name = spec.name if spec else facts.words.get("model", "")
    return LogAnswer(facts, plan, name, tuple(_rows(facts, answer, spec, plan)), constants, tuple(notes))


def model_of(facts: LogFacts) -> str | None:
    """The catalogue's name of the model that the log names, or of one of the same shape: a tuned or quantised copy has its base's.
    None when there is none. Nothing is fetched."""
    said = facts.words.get("model", "")
    entries = catalogue().values()
    for entry in entries:
        if said.lower() == entry.hub_id.lower():
            return entry.name
    return next((entry.name for entry in entries if said and _shape(entry.hub_id) == _shape(said)), None)


_COPIES = re.compile(
    r"[-_.](instruct|it|chat|hf|base|fp8|dynamic|quantized|w\d+a\d+|awq|gptq|bnb|int[48]|4bit|8bit)(?=[-_.]|$)"
)


def _shape(name: str) -> str:
    """A model's name without its owner and without what tells copies of one shape apart."""
    last = name.strip("'\"").replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    while last != (last := _COPIES.sub("", last)):
        pass
    return last


def _stated(facts: LogFacts) -> dict[str, Any]:
    """The fields of a plan that the log states."""
    words = facts.words
    engine = _ENGINES.get(facts.engine, facts.engine)
    plan: dict[str, Any] = {"engine": engine}
    if engine == "vllm" and "version" in words:
        plan["engine_version"] = words["version"]
    for name in ("context", "tp", "pp", "max_batched_tokens", "block_size", "ubatch"):
        if name in words:
            plan[name] = int(words[name].replace(",", ""))
    if "utilization" in words:
        plan["gpu_memory_utilization"] = float(words["utilization"])
    if "mem_fraction" in words:
        plan["mem_fraction_static"] = float(words["mem_fraction"])
    if words.get("eager") == "True":
        plan["enforce_eager"] = True
    if words.get("kv_dtype", "").startswith("fp8"):
        plan["kv_dtype"] = "fp8"
    elif engine == "llama.cpp":
        plan["kv_dtype"] = "fp16"
    if words.get("quantization") in _QUANTIZATION:
        plan["weights"] = _QUANTIZATION[words["quantization"]]
    if words.get("flash") in ("0", "disabled", "off"):
        plan["flash_attention"] = False
    if "cells" in words:
        slots = max(1, int(words.get("concurrency_slots", "1")))
        plan |= {"concurrency": slots, "context": max(1, int(words["cells"]) // slots)}
    if "gpu_layers" in words:
        plan["gpu_layers"] = int(words["gpu_layers"])
    return plan


def _rows(facts: LogFacts, answer: ServingAnswer | None, spec: ModelSpec | None, plan: ServingPlan) -> list[LogRow]:
    computed: dict[str, float | None] = {}
    if answer and spec:
        reserved = {part.name: part.total for part in answer.reserved}
        graphs = [total for name, total in reserved.items() if name.startswith(("graph", "cuda_graphs"))]
        loaded = reserved.get("rotary_table", 0) + reserved.get("expert_padding", 0)
        computed = {
            "weights": answer.weights_bytes + loaded,
            "activation": answer.activation_bytes,
            "non_torch": reserved.get("non_torch"),
            "graphs": sum(graphs) if graphs else None,
            "kv_budget": answer.capacity.budget,
            "cache": answer.kv_bytes,
            "host_weights": answer.host.weights,
            "host_cache": answer.host.state,
        }
    if "torch" in facts.bytes and "weights" in facts.bytes:  # vLLM 0.6 prints the peak with the weights in it
        facts.bytes.setdefault("activation", facts.bytes["torch"] - facts.bytes["weights"])
    rows = [
        LogRow(name, facts.bytes.get(name), computed.get(name), "bytes", facts.lines.get(name))
        for name in ("weights", "activation", "non_torch", "graphs", "kv_budget", "cache", "host_weights", "host_cache")
        if name in facts.bytes
    ]
    room = answer.capacity if answer else None
    counts: dict[str, float | None] = {
        name: getattr(room, field, None)
        for name, field in (("kv_tokens", "tokens"), ("kv_blocks", "blocks"), ("concurrency", "concurrency"))
    }
    within = _within(facts, spec, plan)
    for name, value in counts.items():
        if name in facts.words:
            logged = float(facts.words[name].replace(",", ""))
            rows.append(LogRow(name, logged, value, "count", facts.lines[name]))
            if name in within:
                rows.append(LogRow(f"{name} of the logged budget", logged, within[name], "count", facts.lines[name]))
    return rows


def _within(facts: LogFacts, spec: ModelSpec | None, plan: ServingPlan) -> dict[str, float | None]:
    """What the logged budget holds by computation: the pool alone, whatever the budget was made of."""
    budget = facts.bytes.get("kv_budget", 0)
    if spec is None or budget <= 0:
        return {}
    try:
        room = serve(spec, plan.model_copy(update={"kv_memory_gib": budget / GiB})).capacity
    except InputError:
        return {}
    return {"kv_tokens": room.tokens, "kv_blocks": room.blocks, "concurrency": room.concurrency}
