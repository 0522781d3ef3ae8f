"""Nemotron-NAS (DeciLM): Llama whose layers were searched one by one, some without attention, some with a linear map instead."""

from __future__ import annotations

from typing import Any

from calc.errors import InputError
from calc.model.families.base import Family
from calc.model.families.common import assemble, attention, dropouts, heads, hidden, mlp, num_layers
from calc.model.feed_forward import MLP
from calc.model.fields import Fields
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec, Stack
from calc.model.weights import Norm, dim
from calc.units import round_up

_SOURCE = "https://huggingface.co/nvidia/Llama-3_3-Nemotron-Super-49B-v1/blob/main/modeling_decilm.py"
_PLAIN = (
    "replace_with_linear",
    "sparsify",
    "num_sink_tokens",
    "window_length",
)  # each changes the layer: not understood


def _part(block: Any, name: str, at: int) -> dict[str, Any]:
    part = block.get(name) if isinstance(block, dict) else None
    if not isinstance(part, dict):
        raise InputError.of(f"block_configs[{at}].{name}", part, "it must be an object")
    for key in _PLAIN:
        if part.get(key):
            raise InputError.of(f"block_configs[{at}].{name}.{key}", part[key], "only false or null is understood")
    return part


def _attention(fields: Fields, part: dict[str, Any], at: int) -> Attention | None:
    if part.get("no_op"):
        return None
    count, _, head_dim = heads(fields)
    group = part.get("n_heads_in_group")
    if isinstance(group, bool) or not isinstance(group, int) or group < 1 or count % group:
        raise InputError.of(
            f"block_configs[{at}].attention.n_heads_in_group", group, f"it must divide num_attention_heads ({count})"
        )
    letters = "qkvo" if fields.flag("attention_bias", default=False) else ""
    return attention(fields, sizes=(count, count // group, head_dim), bias=letters)


def _feed_forward(fields: Fields, part: dict[str, Any], at: int) -> MLP | None:
    """The width is 2/3 of `ffn_mult` hidden sizes, rounded up to 256 as in the model's own code."""
    if part.get("no_op"):
        return None
    times = part.get("ffn_mult")
    if isinstance(times, bool) or not isinstance(times, int | float) or not 0 < times <= 64:
        raise InputError.of(f"block_configs[{at}].ffn.ffn_mult", times, "it must be a number above 0, at most 64")
    width = round_up(int(2 * times * hidden(fields) / 3), 256)
    return mlp(fields, width=width, bias=fields.flag("mlp_bias", default=False))


def decilm(fields: Fields) -> ModelSpec:
    blocks = fields.items("block_configs", length=num_layers(fields))
    if blocks is None:
        raise InputError("block_configs: missing; it must list one block for each layer", "block_configs")
    h = dim("h", hidden(fields))
    kinds: dict[Layer, int] = {}
    pattern = []
    for at, block in enumerate(blocks):
        mixer = _attention(fields, _part(block, "attention", at), at)
        forward = _feed_forward(fields, _part(block, "ffn", at), at)
        norms: tuple[Norm, ...] = (Norm("input_norm", h),) if mixer else ()
        norms += (Norm("post_attention_norm", h),) if forward else ()
        name = f"{'attention' if mixer else 'no_attention'}_{forward.intermediate_size if forward else 0}"
        pattern.append(kinds.setdefault(Layer(name, mixer, forward, norms), len(kinds)))
    fields.ignore("intermediate_size", "num_key_value_heads")
    return assemble(
        fields, Stack(tuple(kinds), tuple(pattern)), dropout=dropouts(fields, attention="attention_dropout")
    )


FAMILIES = {"DeciLMForCausalLM": Family(decilm, _SOURCE)}
