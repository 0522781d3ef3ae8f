"""Which type llama-quantize gives each tensor of a GGUF file (llama.cpp, src/llama-quant.cpp), without an importance matrix."""

from __future__ import annotations

from calc.model.feed_forward import MoE
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec
from calc.serving.formats import GGML_BLOCKS

# file type, the type of most tensors
_BASE = {
    "F16": "F16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "IQ4_XS": "IQ4_XS",
    "IQ4_NL": "IQ4_NL",
    "Q4_0": "Q4_0",
    "Q3_K_M": "Q3_K",
    "Q2_K": "Q2_K",
}
_UNTOUCHED = ("F16", "Q8_0")  # the output head keeps the base type
# a type whose blocks of 256 do not divide a row falls back to one with blocks of 32
_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    "IQ4_XS": "IQ4_NL",
}
_RAISED_OUTPUT = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}
_EIGHT_EXPERTS_OUTPUT = frozenset(("Q2_K", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS"))


def _more(layer: int, layers: int) -> bool:
    """The layers that the M mixes give more bits: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _value(ftype: str, layer: int, layers: int, ratio: int) -> str:
    """The type of the value projection; `ratio` is query heads for each KV head."""
    kind = _BASE[ftype]
    if ftype in ("Q4_K_M", "Q5_K_M") and _more(layer, layers):
        kind = "Q6_K"
    elif (ftype == "Q4_K_S" and layer < 4) or (ftype in ("IQ4_XS", "IQ4_NL") and ratio >= 4):
        kind = "Q5_K"
    elif ftype == "Q3_K_M":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif ftype == "Q2_K":
        kind = "Q4_K" if ratio >= 4 else "Q3_K"
    if layers == 80 and kind in ("Q3_K", "Q4_K"):  # the 70B rule of Llama
        kind = "Q5_K"
    return kind


def _down(ftype: str, layer: int, layers: int) -> str:
    """The type of the down projection."""
    kind = _BASE[ftype]
    if ftype in ("Q4_K_M", "Q5_K_M") and _more(layer, layers):
        kind = "Q6_K"
    elif ftype in ("Q4_K_S", "IQ4_XS", "IQ4_NL") and layer < layers // 8:
        kind = "Q5_K"
    elif ftype == "Q3_K_M":
        kind = "Q5_K" if layer < layers // 16 else "Q4_K"
    elif ftype == "Q2_K":
        kind = "Q3_K"
    return kind


def layer_types(ftype: str, spec: ModelSpec, layer: int, kind: Layer) -> tuple[tuple[str, str], ...]:
    """(weight's name, type) of the projections that differ from the base in that layer; "" names the base itself."""
    layers, base = spec.num_hidden_layers, _BASE[ftype]
    found = {"": base, "down": _down(ftype, layer, layers)}
    eight = isinstance(kind.feed_forward, MoE) and kind.feed_forward.num_experts == 8
    if isinstance(kind.mixer, Attention):
        ratio = kind.mixer.num_attention_heads // kind.mixer.num_key_value_heads
        found["value"] = _value(ftype, layer, layers, ratio)
        if ftype != "F16" and eight:
            found["key"] = found["value"] = "Q8_0"
        if kind.mixer.modules[0] == kind.mixer.modules[2]:  # one tensor holds all three
            found["query"] = found["key"] = found["value"]
    if eight and ftype in _EIGHT_EXPERTS_OUTPUT:
        found["output"] = "Q5_K"
    else:
        found["output"] = _RAISED_OUTPUT.get(ftype, base)
    return tuple(sorted(found.items()))


def head_type(ftype: str) -> str:
    """The type of the output head, and of the token table where the two are one tensor."""
    base = _BASE[ftype]
    return base if base in _UNTOUCHED else "Q6_K"


def embedding_type(ftype: str) -> str:
    """The type of a token table of its own."""
    return _BASE[ftype]


def fitting(kind: str, row: int) -> str:
    """The type, or its fallback when its blocks do not divide a row of so many elements."""
    if row % GGML_BLOCKS[kind][1]:
        kind = _FALLBACK.get(kind, kind)
    return kind if row % GGML_BLOCKS[kind][1] == 0 else "F16"
