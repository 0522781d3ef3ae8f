"""Which type llama-quantize gives each tensor of a GGUF file (llama.cpp, src/llama-quant.cpp)."""

from __future__ import annotations

from calc.model.feed_forward import MoE
from calc.model.mixers import Attention
from calc.model.spec import Layer, ModelSpec
from calc.serving.formats import GGML_BLOCKS

# file type, the type of most tensors
_BASE = {
    "BF16": "BF16",
    "F16": "F16",
    "Q8_0": "Q8_0",
    "Q6_K": "Q6_K",
    "Q5_K_M": "Q5_K",
    "Q5_K_S": "Q5_K",
    "Q5_1": "Q5_1",
    "Q5_0": "Q5_0",
    "Q4_K_M": "Q4_K",
    "Q4_K_S": "Q4_K",
    "Q4_1": "Q4_1",
    "Q4_0": "Q4_0",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
    "MXFP4_MOE": "Q8_0",
    "Q3_K_L": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_S": "Q3_K",
    "IQ3_M": "IQ3_S",
    "IQ3_S": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ3_XXS": "IQ3_XXS",
    "Q2_K": "Q2_K",
    "Q2_K_S": "Q2_K",
    "IQ2_M": "IQ2_S",
    "IQ2_S": "IQ2_XS",
    "IQ2_XS": "IQ2_XS",
    "IQ2_XXS": "IQ2_XXS",
    "IQ1_M": "IQ1_M",
    "IQ1_S": "IQ1_S",
}
_UNTOUCHED = ("F16", "BF16", "Q8_0")  # the output head keeps the base type
# a type whose blocks of 256 do not divide a row falls back to one with blocks of 32
_FALLBACK = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
}
# below 3 bits a weight: the type that tensors of more weight are raised to, and that of the attention's output ("": the base)
_LOWEST = {
    "IQ1_S": ("Q2_K", "IQ2_XXS"),
    "IQ1_M": ("Q2_K", "IQ2_XXS"),
    "IQ2_XXS": ("Q2_K", ""),
    "IQ2_XS": ("Q2_K", ""),
    "IQ2_S": ("IQ3_S", "IQ3_S"),
    "IQ2_M": ("IQ3_S", "IQ3_S"),
}
_QUERY_AND_KEY = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
_OUTPUT = {"Q2_K": "Q3_K", "IQ3_XXS": "IQ3_S", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}
_EIGHT_EXPERTS_OUTPUT = frozenset(
    (
        *_LOWEST,
        "Q2_K",
        "IQ3_XXS",
        "IQ3_XS",
        "IQ3_S",
        "IQ3_M",
        "Q3_K_S",
        "Q3_K_M",
        "IQ4_NL",
        "IQ4_XS",
        "Q4_K_S",
        "Q4_K_M",
    )
)
# the value projection where four or more query heads share it, and whatever the heads
_SHARED_VALUE = dict.fromkeys(("Q2_K", "Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S"), "Q4_K") | dict.fromkeys(
    ("IQ4_NL", "IQ4_XS"), "Q5_K"
)
_VALUE = {"IQ3_M": "Q4_K", "Q3_K_L": "Q5_K", "Q2_K": "Q3_K"}
# the down projection of the first eighth of the layers, and of all
_FIRST_DOWN = dict.fromkeys(("Q4_K_S", "IQ4_XS", "IQ4_NL"), "Q5_K") | dict.fromkeys(("Q2_K_S", "IQ3_M"), "Q4_K")
_DOWN = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}


def _more(layer: int, layers: int) -> bool:
    """The layers that the M mixes give more bits: the first and last eighth, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _value(ftype: str, layer: int, layers: int, ratio: int, experts: int) -> str:
    """The type of the value projection; `ratio` is query heads for each KV head."""
    if ftype in _LOWEST:
        return "Q4_K" if ratio >= 4 or experts >= 4 else _LOWEST[ftype][0]
    kind = _VALUE.get(ftype, _BASE[ftype])
    if ftype in ("Q4_K_M", "Q5_K_M") and _more(layer, layers):
        kind = "Q6_K"
    elif ftype == "Q4_K_S" and layer < 4:
        kind = "Q5_K"
    elif ftype == "Q3_K_M":
        kind = "Q5_K" if layer < 2 else "Q4_K"
    elif ratio >= 4:
        kind = _SHARED_VALUE.get(ftype, kind)
    if layers == 80 and kind in ("Q3_K", "Q4_K"):  # the 70B rule of Llama
        kind = "Q5_K"
    return kind


def _down(ftype: str, layer: int, layers: int, experts: int) -> str:
    """The type of the down projection."""
    kind, first = _DOWN.get(ftype, _BASE[ftype]), layer < layers // 8
    if ftype in ("Q4_K_M", "Q5_K_M") and _more(layer, layers):
        kind = "Q6_K"
    elif first and ftype in _LOWEST:
        kind = _LOWEST[ftype][0]
    elif first or (ftype == "IQ3_M" and experts == 8 and _more(layer, layers)):
        kind = _FIRST_DOWN.get(ftype, kind)
    if ftype == "Q3_K_M" and layer < layers // 16:
        kind = "Q5_K"
    return kind


def layer_types(ftype: str, spec: ModelSpec, layer: int, kind: Layer) -> tuple[tuple[str, str], ...]:
    """(weight's name, type) of the projections that differ from the base in that layer; "" names the base itself. The types below
    3 bits are those with an importance matrix, which llama-quantize asks for there."""
    layers, base = spec.num_hidden_layers, _BASE[ftype]
    experts = kind.feed_forward.num_experts if isinstance(kind.feed_forward, MoE) else 0
    found = {"": base, "down": _down(ftype, layer, layers, experts)}
    if ftype == "IQ3_XS" and layers // 8 <= layer < 7 * layers // 8:
        found["gate"] = found["up"] = "IQ3_XXS"
    if isinstance(kind.mixer, Attention):
        ratio = kind.mixer.num_attention_heads // kind.mixer.num_key_value_heads
        found["value"] = _value(ftype, layer, layers, ratio, experts)
        found["query"] = found["key"] = _QUERY_AND_KEY.get(ftype, base)
        if experts == 8 and base not in _UNTOUCHED:
            found["key"] = "Q4_K" if ftype in _LOWEST else "Q8_0"
            found["value"] = "Q4_K" if ftype in _LOWEST else "Q8_0"
        if kind.mixer.modules[0] == kind.mixer.modules[2]:  # one tensor holds all three
            found["query"] = found["key"] = found["value"]
    if experts == 8 and ftype in _EIGHT_EXPERTS_OUTPUT:
        found["output"] = "Q5_K"
    else:
        found["output"] = (_LOWEST[ftype][1] if ftype in _LOWEST else _OUTPUT.get(ftype, "")) or base
    return tuple(sorted(found.items()))


def head_type(ftype: str) -> str:
    """The type of the output head, and of the token table where the two are one tensor."""
    if ftype in _LOWEST or ftype == "IQ3_XXS":
        return "Q5_K"
    return _BASE[ftype] if _BASE[ftype] in _UNTOUCHED else "Q6_K"


def embedding_type(ftype: str) -> str:
    """The type of a token table of its own."""
    return _LOWEST[ftype][0] if ftype in _LOWEST else "IQ3_S" if ftype == "IQ3_XXS" else _BASE[ftype]


def fitting(kind: str, row: int) -> str:
    """The type, or its fallback when its blocks do not divide a row of so many elements."""
    if row % GGML_BLOCKS[kind][1]:
        kind = _FALLBACK.get(kind, kind)
    return kind if row % GGML_BLOCKS[kind][1] == 0 else "F16"
