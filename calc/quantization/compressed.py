"""compressed-tensors (llm-compressor): groups of modules, each with the bits, the strategy and the packing of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calc.errors import InputError
from calc.model.fields import Fields
from calc.quantization import schemes
from calc.quantization.format import Quantization, Rule, bits_of, block_size, flag_of, group_of, kv_of, modules, wide
from calc.quantization.modules import Modules
from calc.quantization.schemes import Scheme, Tensor

_URL = "https://github.com/vllm-project/compressed-tensors"
_CLASSES = ("Linear", "linear", "nn.Linear", "FusedMoE", "re:.*")  # targets that mean every linear layer
_SHAPE = Tensor("shape", 2 * 64, 0, 0)  # weight_shape, two int64


def compressed(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """The schemes of `config_groups` by their targets, and `ignore` first of all."""
    found = fields.data.get("config_groups")
    if not isinstance(found, dict) or not found:
        raise InputError.of(fields.name("config_groups"), found, "it must be an object of groups")
    ignored = modules(fields, "ignore")
    packing = str(fields.data.get("format") or "")
    rules = list(wide(ignored))
    general: Scheme | None = None
    for name, data in found.items():
        if not isinstance(data, dict):
            raise InputError.of(f"{fields.name('config_groups')}.{name[:80]}", data, "it must be an object")
        own = Fields(data, f"{fields.name('config_groups')}.{name[:80]}")
        scheme = _scheme(own, str(own.data.get("format") or packing))
        targets = own.data.get("targets", ["Linear"])
        if scheme is None:
            continue
        if not isinstance(targets, list) or any(target in _CLASSES for target in targets):
            general = general or scheme
        else:
            rules.append(Rule(Modules(targets, own.name("targets")), scheme))
    kv = kv_of(fields, "kv_cache_scheme")
    scale = 16 if kv and isinstance(fields.data.get("kv_cache_scheme"), dict) else 0
    roles = frozenset(
        ("linear", "expert", "scalar", "head", *(() if ignored.towers else ("tower",))) if general else ()
    )
    scheme = (
        general
        or next((rule.scheme for rule in rules if rule.scheme), None)
        or Scheme("16 bits", (schemes.values(16),), schemes.BF16_COMPUTE, _URL)
    )
    family = {"fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4", "mxfp4": "mxfp4"}.get(scheme.label, "compressed-tensors")
    return Quantization(family, scheme, tuple(rules), roles, kv_dtype=kv, kv_scale_bits=scale)


def _scheme(fields: Fields, packing: str) -> Scheme | None:
    """The scheme of a group; None where its weights stay as they are."""
    fields.ignore("input_activations", "output_activations", "targets", "format")
    data: Any = fields.data.get("weights")
    if data is None:
        return None
    if not isinstance(data, dict):
        raise InputError.of(fields.name("weights"), data, "it must be an object")
    own = Fields(data, fields.name("weights"))
    inputs = fields.data.get("input_activations")
    inputs = inputs if isinstance(inputs, dict) else {}
    static = bool(inputs) and inputs.get("dynamic") is False
    bits = bits_of(own, "num_bits", default=8)
    rows, columns = _cells(own)
    if own.data.get("type", "int") == "float":
        return _float(bits, rows, columns, inputs, static, packing, group_of(own, "group_size", default=0))
    packed = packing in ("pack-quantized", "marlin-24") or (not packing and bits < 8)
    zero = 0 if flag_of(own, "symmetric", True) else (bits if packed else 8)
    stored = 8 if packing == "int-quantized" else bits  # a byte a value, however few bits it uses
    scheme = schemes.integers(stored, rows, columns, zero_bits=zero, dynamic=bool(inputs))
    if packed:
        scheme = scheme.with_tensors(_SHAPE)
    if own.data.get("actorder") in ("group", True):
        scheme = scheme.with_tensors(Tensor("group_index", 32, 0, 1))
    return scheme.with_tensors(Tensor("input_scale", 16, 0, 0)) if static else scheme


def _float(bits: int, rows: int, columns: int, inputs: dict[str, Any], static: bool, packing: str, size: int) -> Scheme:
    if bits == 4 and (packing.startswith("mxfp4") or size == 32):
        return schemes.mx(4)
    if bits == 4:
        return schemes.nvfp4(inputs=bool(inputs), size=size or 16)
    if packing.startswith("mxfp8") or (bits == 8 and size == 32):
        return schemes.mx(8, compute=("fp8",) if inputs else schemes.BF16_COMPUTE)
    return schemes.fp8(rows, columns, scale_bits=16, static=static, weight_only=not inputs)


def _cells(fields: Fields) -> tuple[int, int]:
    """(rows, columns) of a scale by the strategy of the weights."""
    size = group_of(fields, "group_size", default=0)
    strategy = str(fields.data.get("strategy") or ("group" if size > 0 else "tensor"))
    if strategy == "block":
        return block_size(fields, "block_structure") or (128, 128)
    if strategy in ("group", "tensor_group"):
        return 1, schemes.group(size)
    return (1, 0) if strategy == "channel" else (0, 0)
