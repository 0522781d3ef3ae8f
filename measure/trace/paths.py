"""A prediction and a trace of the same step under the same paths, so that `calc.breakdown.compare` lays them side by side.

The prediction names parts of the model, the trace modules of transformers and operators of PyTorch. States are joined tensor by
tensor, activations by the part of the model that made them, and what backward makes and frees at the peak is one line, `temporaries`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from calc.breakdown import Breakdown, Component, Number, Pair, Row, compare
from calc.model.spec import ModelSpec
from calc.model.weights import Part

_STATES = ("parameters", "gradients", "optimizer")
_MOMENTS = {"exp_avg": "moment_1", "exp_avg_sq": "moment_2", "momentum_buffer": "momentum"}
_OUTSIDE_BLOCKS = {  # what the prediction lists among the activations: its names, and the place that both share
    "cosines": "rotary", "sines": "rotary", "frequencies": "rotary", "original_frequencies": "rotary",
    "loss": "end/loss", "input_ids": "input_ids", "position_ids": "model", "mask": "model",
    "router_correction": "router_correction", "embedding_scale": "layers/residual",
}  # fmt: skip
_BRANCHES = {
    "mixer_output": "attention",
    "feed_forward_output": "mlp",
}  # what dropout leaves of what joins the residual
_STREAM = "layers/residual"  # what runs from layer to layer
_NORMS = {  # transformers' names of norms
    "ln_1": "input_norm", "ln_2": "post_attention_norm", "input_layernorm": "input_norm", "q_a_layernorm": "q_norm",
    "kv_a_layernorm": "kv_norm", "post_attention_layernorm": "post_attention_norm", "query_norm": "q_norm", "key_norm": "k_norm",
    "query_layernorm": "q_norm", "key_layernorm": "k_norm", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
    "pre_feedforward_layernorm": "pre_feedforward_norm", "post_feedforward_layernorm": "post_feedforward_norm",
}  # fmt: skip
_BODIES = ("model", "transformer", "gpt_neox")  # the model below its head: its own operators make positions and masks
_ATTENTIONS = ("self_attn", "attn", "attention", "linear_attn")
_ENDS = {  # modules outside the stack, by the last part of their path
    "lm_head": "end/head", "norm": "end/final_norm", "ln_f": "end/final_norm", "final_layernorm": "end/final_norm",
    "embed_tokens": "embedding/token", "wte": "embedding/token", "wpe": "embedding/position", "rotary_emb": "rotary",
    "drop": "embedding/dropped",
}  # fmt: skip


def laid_side_by_side(predicted: Breakdown, alive: Iterable[Mapping[str, Any]], spec: ModelSpec) -> list[Pair]:
    """Predicted and traced bytes of the peak by path; what only one has stays visible, and the last row is the total.

    `alive` are the rows of a trace's JSON under that name.
    """
    names = _Names(spec, any(row.path.startswith("gathered/") for row in predicted.rows()))
    ours = _breakdown((names.of_prediction(row), row.value) for row in predicted.rows())
    traced = _breakdown((names.of_trace(row), row["value"]) for row in alive)
    return [pair for pair in compare(ours, traced) if pair.predicted or pair.observed]


def _breakdown(found: Iterable[tuple[str, Number]]) -> Breakdown:
    """Leaves whose names are whole paths, in the order of their first appearance; equal paths are summed."""
    sums: dict[str, Number] = {}
    for path, value in found:
        sums[path] = sums.get(path, 0) + value
    return Breakdown(Component("", children=tuple(Component(path, value) for path, value in sums.items())), "bytes")


class _Names:
    """The paths that a model's parts have in both."""

    def __init__(self, spec: ModelSpec, sharded: bool) -> None:
        self.sharded = sharded  # FSDP2: a group's gradients are one buffer
        parts = [part for found in spec.layers.kind_parts for part in found]
        self.parts = {part.name for part in parts}
        self.tied = spec.tied
        self.by_weight = {key: name for part in parts for key, name in _joined(part)}
        self.by_module = {
            (part.name, weight.module): self.by_weight[part.name, weight.name]
            for part in parts
            for weight in part.weights
            if weight.module
        }

    def of_prediction(self, row: Row) -> str:
        """The common path of one of the prediction's leaves."""
        path, (category, *rest) = row.path, row.path.split("/")
        if (
            rest == ["loss_gradient"]
            or (category == "gradients" and self.tied and rest[0] == "head")
            or path == "gathered/root_gradients"
        ):
            return "temporaries"
        if category == "gathered":
            return path
        if category == "gradients" and self.sharded:
            return f"gradients/{rest[0] if rest[0] in ('layers', 'rounding') else 'root'}"
        if category in _STATES:
            return "/".join([category, *self._predicted_state(rest)])
        if category == "working" and re.search(r"gradients?(_\d+)?$", rest[-1]):
            of_tokens = {"b", "s"} & set(row.component.numbers)  # else of a weight, which belongs to the gradients
            waits = self.sharded or of_tokens or rest[-1] == "table_gradient"
            return "temporaries" if waits else f"gradients/{rest[0]}"
        if category not in ("activations", "working"):
            return path
        return "activations/" + self._predicted_activation(rest)

    def _predicted_state(self, rest: list[str]) -> list[str]:
        if rest[0] == "layers":
            part, name, *state = self._inside(rest)
            if name == "adapters":
                return ["layers", part, name, *state]
            return ["layers", part, self.by_weight.get((part, name), _NORMS.get(name, name)), *state]
        if rest[0] in ("final_norm", "head"):
            bias = ["bias"] if rest[1].endswith("_bias") else []
            return ["end", rest[0], *bias, *rest[2:]]
        return rest

    def _predicted_activation(self, rest: list[str]) -> str:
        outside = _OUTSIDE_BLOCKS.get(re.sub(r"_\d+$", "", rest[0]))
        if outside:
            return outside
        if rest[-1] == "input" and len(rest) < 3:
            return _STREAM
        if rest[0] == "layers":
            inside = self._inside(rest)
            if inside[0] == "norms":
                return f"layers/norms/{inside[1]}"
            branch = _BRANCHES.get(inside[0].removesuffix("_mask"))
            if branch:
                return f"layers/{branch}"
            return f"layers/{inside[0]}" if inside[0] in self.parts else _STREAM
        if rest[0] == "end":
            return "/".join(rest[:2])
        if rest[-1] == "positions":
            return "model"
        return _STREAM if rest[0] == "embedding" else "/".join(rest)

    def _inside(self, rest: list[str]) -> list[str]:
        """What follows `layers` and the layer's kind."""
        at = next((index for index, name in enumerate(rest) if name in self.parts), len(rest) - 1)
        return rest[at:]

    def of_trace(self, row: Mapping[str, Any]) -> str:
        """The common path of one of the trace's rows."""
        category = str(row["category"])
        place, module, name = _place(str(row["made_by"]))
        if category in _STATES:
            return f"{category}/{self._traced_state(place, module, name)}"
        if category == "gathered":
            return f"gathered/{self._gathered(place, module, name)}"
        if category == "temporaries" and row["phase"] != "forward":
            return "optimizer_step" if row["phase"] == "step" else "temporaries"
        return "activations/" + self._traced_activation(place, module, name)

    def _traced_state(self, place: str, module: str, name: str) -> str:
        if name in ("rounding", "sharded"):
            return "rounding" if name == "rounding" else place or "root"
        parameter, _, state = name.partition("/")
        if state == "step":
            return "steps"
        if parameter == "nf4_tables":
            return parameter
        tail = [_MOMENTS.get(state, state)] if state else []
        if not place:
            end = _end_of(module)
            biases = ["bias"] if parameter == "bias" else []
            return "/".join([end or f"{module}/{parameter}", *biases, *tail])
        part, leaf = self._part(module), module.removesuffix(".base_layer").rpartition(".")[2]
        adapter = re.search(r"([^.]+)\.(lora_\w+)\.default$", module)
        if adapter:
            return "/".join([place, part, "adapters", adapter[1], adapter[2], *tail])
        bias = "_bias" if parameter.endswith("bias") else ""
        if parameter.removesuffix("_bias") not in ("weight", "bias"):  # the parameter is named as a module would be
            leaf = parameter.removesuffix("_bias")
        known = self.by_module.get((part, leaf)) or _NORMS.get(leaf, part if part == "router" else leaf)
        return "/".join([place, part, f"{known}{bias}", *tail])

    def _traced_activation(self, place: str, module: str, name: str) -> str:
        if not place:
            if name == "input_ids" or module in _BODIES:
                return name if name == "input_ids" else "model"
            end = _end_of(module)
            return _STREAM if end and end.startswith("embedding") else end or "end/loss"
        if name == "e_score_correction_bias":
            return "router_correction"
        part = self._part(module)
        if part == "norms":
            leaf = module.rpartition(".")[2]
            return f"{place}/norms/{_NORMS.get(leaf, leaf)}"
        return f"{place}/{part}" if part in self.parts else _STREAM

    def _gathered(self, place: str, module: str, name: str) -> str:
        return name if name in ("all_gather", "reduce_scatter") else "layers" if place else "root"

    def _part(self, module: str) -> str:
        """The part of the model that a module of a layer belongs to."""
        names = module.removesuffix(".base_layer").split(".")
        if names[0] in _ATTENTIONS:
            return "attention"
        if len(names) == 1 and ("norm" in names[0] or names[0].startswith("ln_")):
            return "norms"
        if "experts" in names:
            return "experts"
        if any(name.startswith("shared") for name in names):
            return "shared_expert"
        if names[-1] in ("gate", "router") and "router" in self.parts:
            return "router"
        return "mlp" if "mlp" in self.parts and names[0] else "experts" if names[0] else ""


def _joined(part: Part) -> Iterator[tuple[tuple[str, str], str]]:
    """Each weight of a part by (part, name), with the name of the tensor that holds it: those of one module together."""
    held: dict[str, list[str]] = {}
    for weight in part.weights:
        if weight.module:
            held.setdefault(weight.module, []).append(weight.name)
    whole = {name: "_".join(names) for names in held.values() for name in names}
    for weight in part.weights:
        base = weight.name.removesuffix("_bias")
        bias = "_bias" if base != weight.name else ""
        yield (part.name, weight.name), whole[base] + bias if base in whole else _NORMS.get(weight.name, weight.name)


def _place(made_by: str) -> tuple[str, str, str]:
    """`layers` or "", the module's path, and the name below it."""
    place, rest = ("layers", made_by.removeprefix("layers/")) if made_by.startswith("layers/") else ("", made_by)
    module, slash, name = rest.partition("/")
    return (place, module.removeprefix("base_model.model."), name) if slash else (place, "", rest)


def _end_of(module: str) -> str | None:
    return _ENDS.get(module.rpartition(".")[2])
