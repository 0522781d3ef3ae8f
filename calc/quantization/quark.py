"""AMD Quark: one configuration for all layers, overrides by name or pattern, and what is excluded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.errors import InputError
from calc.model.fields import Fields
from calc.quantization import schemes
from calc.quantization.format import Quantization, Rule, flag_of, group_of, modules, wide
from calc.quantization.modules import Modules
from calc.quantization.schemes import Scheme

_INTEGERS = {"int4": 4, "uint4": 4, "int8": 8, "uint8": 8}


def quark(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """`global_quant_config`, `layer_quant_config` and `exclude`."""
    general = _scheme(fields.data.get("global_quant_config"), fields.name("global_quant_config"))
    if general is None:
        raise InputError.of(fields.name("global_quant_config"), None, "it must say how weights are stored")
    rules = list(wide(modules(fields, "exclude")))
    own = fields.data.get("layer_quant_config")
    for name, row in own.items() if isinstance(own, dict) else ():
        rules.append(
            Rule(Modules([name], fields.name("layer_quant_config")), _scheme(row, fields.name("layer_quant_config")))
        )
    groups = fields.data.get("kv_cache_quant_config") or {}
    kv = (
        next((str(_weight(row, "output_tensors").get("dtype", "")) for row in groups.values()), "")
        if isinstance(groups, dict)
        else ""
    )
    cache = "fp8" if kv.startswith("fp8") else "int8" if kv == "int8" else ""
    family = general.label if general.label in ("fp8", "mxfp4", "int8") else "quark"
    return Quantization(family, general, tuple(rules), kv_dtype=cache, kv_scale_bits=32 if cache else 0)


def _weight(data: Any, key: str = "weight") -> dict[str, Any]:
    """What a configuration says of a tensor; the first where it is a list of steps."""
    found = data.get(key) if isinstance(data, dict) else None
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, dict) else {}


def _scheme(data: Any, where: str) -> Scheme | None:
    weight, inputs = _weight(data), _weight(data, "input_tensors")
    if not weight:
        return None
    own = Fields(weight, f"{where}.weight")
    kind = str(weight.get("dtype") or "")
    shape = str(weight.get("qscheme") or "per_tensor")
    size = group_of(own, "group_size", default=32)
    if kind == "fp4":
        return schemes.mx(4, compute=("fp4",) if inputs else schemes.BF16_COMPUTE)
    rows, columns = {"per_tensor": (0, 0), "per_channel": (1, 0)}.get(shape, (1, schemes.group(size)))
    if kind.startswith("fp8"):
        static = bool(inputs) and not bool(inputs.get("is_dynamic"))
        return schemes.fp8(rows, columns, static=static, weight_only=not inputs)
    if kind not in _INTEGERS:
        raise InputError.of(own.name("dtype"), kind, f"it must be fp4, fp8_e4m3, {', '.join(_INTEGERS)}")
    bits = _INTEGERS[kind]
    zeros = 0 if flag_of(own, "symmetric", True) else bits
    return schemes.integers(bits, rows, columns, zero_bits=zeros, dynamic=bool(inputs))
