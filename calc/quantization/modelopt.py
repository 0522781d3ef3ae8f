"""NVIDIA ModelOpt: an algorithm for all linear layers or for each by name, and what is excluded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from calc.errors import InputError
from calc.model.fields import Fields
from calc.quantization import schemes
from calc.quantization.compressed import compressed
from calc.quantization.format import Quantization, Rule, group_of, kv_of, modules, wide
from calc.quantization.modules import Modules
from calc.quantization.schemes import Scheme, Tensor

_SMOOTH = Tensor("input_smoothing", 16, 0, 1)  # pre_quant_scale
# the algorithm of `quant_algo` (modelopt/torch/export): how it stores a layer with groups of that size
_ALGORITHMS: Final[Mapping[str, Callable[[int], Scheme]]] = {
    "FP8": lambda size: schemes.fp8(0, 0, static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda size: schemes.fp8(1, 0),
    "FP8_PB_WO": lambda size: schemes.fp8(128, 128, weight_only=True),
    "FP8_PB_REAL": lambda size: schemes.fp8(128, 128),
    "NVFP4": lambda size: schemes.nvfp4(size=size or 16),
    "NVFP4_AWQ": lambda size: schemes.nvfp4(size=size or 16).with_tensors(_SMOOTH),
    "NVFP4_SVDQUANT": lambda size: schemes.nvfp4(size=size or 16).with_tensors(_SMOOTH),
    "W4A16_NVFP4": lambda size: schemes.nvfp4(inputs=False, size=size or 16),
    "W4A8_NVFP4_FP8": lambda size: schemes.nvfp4(size=size or 16),
    "MXFP4": lambda size: schemes.mx(4),
    "W4A8_MXFP4_FP8": lambda size: schemes.mx(4),
    "MXFP8": lambda size: schemes.mx(8, compute=("fp8",)),
    "W4A16_AWQ": lambda size: schemes.integers(4, 1, size or 128).with_tensors(_SMOOTH),
    "W4A8_AWQ": lambda size: schemes.integers(4, 1, size or 128).with_tensors(_SMOOTH),
    "INT4_AWQ": lambda size: schemes.integers(4, 1, size or 128).with_tensors(_SMOOTH),
    "W8A16": lambda size: schemes.integers(8, 1, 0),
    "W8A8_SQ_PER_CHANNEL": lambda size: schemes.integers(8, 1, 0, scale_bits=32, dynamic=True),
}
_FAMILY = {"fp8": "fp8", "nvfp4": "nvfp4", "mxfp4": "mxfp4", "int8": "int8"}


def modelopt(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """`quant_algo`, or for MIXED_PRECISION the algorithms of `quantized_layers`; what is excluded stays as it is."""
    nested = fields.data.get("quantization")
    if isinstance(nested, dict):
        fields = Fields({**nested, "quant_method": "modelopt"}, fields.name("quantization"))
    excluded = modules(fields, "exclude_modules", "ignore")
    kv = kv_of(fields)
    given = fields.data.get("quant_algo")
    if isinstance(fields.data.get("quantized_layers"), dict):
        rules = (*layer_rules(fields), *wide(excluded))
        scheme = next((rule.scheme for rule in rules if rule.scheme), None)
        if scheme is None:
            raise InputError.of(fields.name("quantized_layers"), {}, "it must name the layers of MIXED_PRECISION")
        return Quantization(
            _FAMILY.get(scheme.label, "modelopt"),
            scheme,
            rules,
            frozenset(),
            kv_dtype=kv,
            kv_scale_bits=32 if kv else 0,
        )
    if given is None and isinstance(fields.data.get("config_groups"), dict):
        return compressed(fields, config)
    if given == "MIXED_PRECISION" and isinstance(fields.data.get("config_groups"), dict):
        found = compressed(fields, config)
        return Quantization(
            found.family,
            found.scheme,
            found.rules,
            found.roles - {"head", "tower"},
            kv_dtype=kv,
            kv_scale_bits=32 if kv else 0,
        )
    scheme = algorithm(given, group_of(fields, "group_size", default=0), fields.name("quant_algo"))
    return Quantization(
        _FAMILY.get(scheme.label, "modelopt"), scheme, wide(excluded), kv_dtype=kv, kv_scale_bits=32 if kv else 0
    )


def algorithm(name: Any, size: int, field: str) -> Scheme:
    """The scheme of an algorithm by its name."""
    known = name.upper() if isinstance(name, str) else ""
    if known not in _ALGORITHMS:
        raise InputError.of(field, name, f"it must be one of {', '.join(_ALGORITHMS)}, MIXED_PRECISION")
    return _ALGORITHMS[known](max(size, 0))


def layer_rules(fields: Fields) -> tuple[Rule, ...]:
    """A rule for each algorithm of `quantized_layers`, with all the layers that it names."""
    layers: Mapping[str, Any] = fields.data["quantized_layers"]
    fields.ignore("quantized_layers")
    named: dict[tuple[str, int], list[str]] = {}
    for name, row in layers.items():
        if not isinstance(row, dict):
            raise InputError.of(f"{fields.name('quantized_layers')}.{name[:80]}", row, "it must be an object")
        size = row.get("group_size")
        named.setdefault((str(row.get("quant_algo")), size if type(size) is int else 0), []).append(name)
    where = fields.name("quantized_layers")
    return tuple(Rule(Modules(names, where), algorithm(name, size, where)) for (name, size), names in named.items())
