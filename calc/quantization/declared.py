"""From a config's `quantization_config` (or MLX's `quantization`) to the scheme of each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from calc.model.fields import Fields
from calc.quantization import floats, integers, schemes
from calc.quantization.compressed import compressed
from calc.quantization.format import Quantization
from calc.quantization.modelopt import modelopt
from calc.quantization.quark import quark
from calc.quantization.schemes import Scheme

READERS: Final[Mapping[str, Callable[[Fields, Mapping[str, Any]], Quantization]]] = {
    "gptq": integers.gptq,
    "gptq-v2": integers.gptq,
    "gptq-marlin": integers.gptq,
    "marlin": integers.gptq,
    "gptqmodel": integers.gptq,
    "awq": integers.awq,
    "awq-marlin": integers.awq,
    "auto-round": integers.auto_round,
    "intel/auto-round": integers.auto_round,
    "bitsandbytes": integers.bitsandbytes,
    "fp8": floats.fp8,
    "deepseek-v4-fp8": floats.fp8,
    "fbgemm-fp8": floats.fbgemm,
    "mxfp4": floats.mxfp4,
    "gpt-oss-mxfp4": floats.mxfp4,
    "mlx": integers.mlx,
    "eetq": integers.eetq,
    "hqq": integers.hqq,
    "aqlm": integers.aqlm,
    "torchao": integers.torchao,
    "bitnet": integers.bitnet,
    "compressed-tensors": compressed,
    "modelopt": modelopt,
    "modelopt-fp4": modelopt,
    "modelopt-mixed": modelopt,
    "quark": quark,
}


TEXT_SECTIONS: Final = ("text_config", "llm_config", "language_config", "thinker_config")


def declared(config: Mapping[str, Any]) -> Quantization | None:
    """What a config declares of its weights; None where it declares nothing. InputError where its values are out of bounds."""
    data, where = _section(config)
    if data is None:
        return None
    method = _method(data) if isinstance(data, dict) else str(data)[:40]
    if method not in READERS or not isinstance(data, dict):
        note = f"{where}: {method or 'a format'!r} is not understood: the weights are counted in 16 bits"
        kept = Scheme(method or "?", (schemes.values(16),), schemes.BF16_COMPUTE, "as it is")
        return Quantization("bf16", kept, roles=frozenset(), notes=(note,))
    found = READERS[method](Fields(data, where), config)
    unread = [entry for rule in found.rules for entry in rule.modules.unread]
    notes = [
        f"{where}: the pattern {entry[:80]!r} is not read: its modules are counted as the others"
        for entry in unread[:5]
    ]
    if "." in where:  # the text's section speaks of the text model alone
        found = replace(found, roles=found.roles - {"tower"})
    return replace(found, notes=(*found.notes, *notes))


def _section(config: Mapping[str, Any]) -> tuple[Any, str]:
    """The declaration and its name: at the top, or in the section of the text model."""
    text: Any = next((config[key] for key in TEXT_SECTIONS if isinstance(config.get(key), dict)), {})
    for data, prefix in ((config, ""), (text, "text_config.")):
        for key in ("quantization", "quantization_config", "compression_config"):
            if data.get(key) is not None:
                return data[key], prefix + key
    return None, ""


def _method(data: Mapping[str, Any]) -> str:
    """The method by its name, or by the fields that only it has."""
    named = data.get("quant_method") or data.get("quant_library")
    if isinstance(named, str) and named:
        return named.lower().replace("_", "-")
    signs = (
        ("modelopt", "quant_algo"),
        ("compressed-tensors", "config_groups"),
        ("bitsandbytes", "load_in_4bit"),
        ("bitsandbytes", "load_in_8bit"),
        ("fp8", "weight_block_size"),
        ("gptq", "desc_act"),
        ("mlx", "group_size"),
    )
    return next((method for method, key in signs if key in data), "")


@lru_cache(maxsize=1)
def named() -> Mapping[str, Quantization]:
    """The formats that `--weights` names, with the details that are usual: groups of 128, blocks of 128 x 128."""
    rows = (
        Quantization("fp8", schemes.fp8(128, 128)),
        Quantization("int8", schemes.llm_int8()),
        Quantization("gptq-int4", schemes.gptq(4, 128, index=False)),
        Quantization("awq-int4", schemes.awq(4, 128)),
        Quantization("nf4", schemes.bnb4("nf4", double=True)),
        Quantization("mxfp4", schemes.mx(4), roles=frozenset(("expert",)), in_experts=True),
        Quantization("nvfp4", schemes.nvfp4(inputs=True)),
        *(
            Quantization(
                f"mlx-int{bits}",
                schemes.mlx(bits, 64, "affine"),
                roles=integers.EVERY | {"embedding"},
                least_columns=64,
            )
            for bits in (8, 4)
        ),
    )
    return {row.family: row for row in rows}
