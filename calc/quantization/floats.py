"""Methods that store floats of 8 or 4 bits: transformers' fp8, FBGEMM's, and MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.model.fields import Fields
from calc.quantization import schemes
from calc.quantization.format import Quantization, Rule, block_size, kv_of, modules, wide
from calc.quantization.modelopt import layer_rules
from calc.quantization.modules import Modules


def fp8(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """The fp8 of DeepSeek-V3 and of transformers (blocks), and of AutoFP8 (a scale a tensor)."""
    static = fields.data.get("activation_scheme") == "static"
    size = block_size(fields)
    scheme = schemes.fp8(*(size or (0, 0)), static=static)
    skipped = modules(fields, "modules_to_not_convert", "ignored_layers", "ignore")
    rules = list(wide(skipped))
    if isinstance(fields.data.get("quantized_layers"), dict):
        rules = [*layer_rules(fields), *rules]
    elif config.get("expert_dtype") == "fp4":  # DeepSeek-V4: MXFP4 experts next to fp8 blocks
        rules.insert(0, Rule(Modules(["ffn.experts", "mlp.experts"], "expert_dtype"), schemes.mx(4)))
    return Quantization("fp8", scheme, tuple(rules), kv_dtype=kv_of(fields))


def fbgemm(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    return Quantization("fp8", schemes.fp8(1, 0), wide(modules(fields, "modules_to_not_convert")))


def mxfp4(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    skipped = modules(fields, "modules_to_not_convert")
    return Quantization("mxfp4", schemes.mx(4), wide(skipped), frozenset(("expert",)), in_experts=True)
