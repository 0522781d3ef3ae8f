"""Methods that store whole numbers: GPTQ, AWQ, AutoRound, bitsandbytes, MLX, EETQ, HQQ, AQLM, torchao and BitNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from calc.errors import InputError
from calc.model.fields import Fields
from calc.quantization import schemes
from calc.quantization.format import LINEAR, Quantization, Rule, bits_of, flag_of, group_of, modules, wide
from calc.quantization.modules import Modules, Role
from calc.quantization.schemes import Scheme, Tensor

_HEAD: Final[frozenset[Role]] = frozenset(("head",))
_ENDS: Final[frozenset[Role]] = frozenset(("head", "embedding"))
EVERY: Final[frozenset[Role]] = LINEAR | {"router", "scalar", "head"}


def gptq(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    bits, size = bits_of(fields, "bits", "w_bit", "wbits"), group_of(fields, "group_size", "q_group_size", "groupsize")
    kind = str(fields.data.get("checkpoint_format") or fields.data.get("format") or "gptq")
    marlin = kind == "marlin" or bool(fields.data.get("is_marlin_format"))
    old = "model_file_base_name" in fields.data and "checkpoint_format" not in fields.data
    awq_like = kind.startswith("gemm") or kind == "awq" or str(fields.data.get("method", "")) == "awq"

    def made(bits: int, size: int) -> Scheme:
        if awq_like:
            return schemes.awq(bits, size)
        return schemes.gptq(bits, size, index=not marlin, zeros=not marlin, biases=old)

    rules = [*_dynamic(fields, made, bits, size)]
    rules += wide(modules(fields, "modules_to_not_convert"))
    inside = fields.data.get("modules_in_block_to_quantize")
    if isinstance(inside, list) and inside:
        names = [name for part in inside for name in (part if isinstance(part, list) else [part])]
        only = Modules(names, fields.name("modules_in_block_to_quantize"))
        scheme = made(bits, size)
        return Quantization("gptq-int4", scheme, (*rules, Rule(only, scheme)), frozenset())
    roles = LINEAR | _HEAD if flag_of(fields, "lm_head", False) else LINEAR
    return Quantization("gptq-int4", made(bits, size), tuple(rules), roles)


def _dynamic(fields: Fields, make: Callable[[int, int], Scheme], bits: int, size: int) -> list[Rule]:
    """GPTQModel's overrides by pattern: "-:" keeps a module as it is, "+:" or nothing gives it other bits or groups."""
    found = fields.data.get("dynamic")
    if found is None:
        return []
    if not isinstance(found, dict):
        raise InputError.of(fields.name("dynamic"), found, "it must be an object of patterns")
    rules = []
    for pattern, override in found.items():
        matched = Modules(["re:" + pattern.removeprefix("-:").removeprefix("+:")], fields.name("dynamic"))
        if pattern.startswith("-:"):
            rules.append(Rule(matched, None))
            continue
        if not isinstance(override, dict):
            raise InputError.of(f"{fields.name('dynamic')}.{pattern[:80]}", override, "it must be an object")
        own = Fields(override, fields.name("dynamic"))
        rules.append(Rule(matched, make(bits_of(own, "bits", default=bits), group_of(own, "group_size", default=size))))
    return rules


def awq(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    bits = bits_of(fields, "bits", "w_bit")
    size = group_of(fields, "group_size", "q_group_size")
    zeros = flag_of(fields, "zero_point", True)
    marlin = str(fields.data.get("version", "gemm")).lower() == "marlin"
    scheme = schemes.awq(bits, size, zeros=not marlin) if zeros or not marlin else schemes.awq(bits, size, zeros=False)
    return Quantization("awq-int4", scheme, wide(modules(fields, "modules_to_not_convert", "modules_to_not_quantize")))


def auto_round(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """AutoRound: packed as GPTQ or AWQ, with overrides in `extra_config` by name or pattern."""
    packing = str(fields.data.get("packing_format") or fields.data.get("backend") or "auto_round:auto_gptq")
    bits, size = bits_of(fields, "bits"), group_of(fields, "group_size")

    def made(bits: int, size: int) -> Scheme:
        return schemes.awq(bits, size) if "awq" in packing else schemes.gptq(bits, size, index=False)

    rules = []
    extra = fields.data.get("extra_config")
    for name, override in extra.items() if isinstance(extra, dict) else ():
        own = Fields(override if isinstance(override, dict) else {}, fields.name("extra_config"))
        width = bits_of(own, "bits", default=bits)
        pattern = f"re:{name}" if set(name) & set("*[]()\\") else name
        kept = width >= 16
        rules.append(
            Rule(
                Modules([pattern], fields.name("extra_config")),
                None if kept else made(width, group_of(own, "group_size", default=size)),
            )
        )
    return Quantization("gptq-int4", made(bits, size), (*rules, *wide(modules(fields, "modules_to_not_convert"))))


def bitsandbytes(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    skipped = modules(fields, "llm_int8_skip_modules")
    roles: frozenset[Role] = EVERY - {"head", "router"} | {"tower"}
    if skipped and not any("head" in word for word in skipped.words):
        roles |= {"head"}
    if flag_of(fields, "load_in_8bit", False) or flag_of(fields, "_load_in_8bit", False):
        return Quantization("int8", schemes.llm_int8(), wide(skipped), roles)
    double = flag_of(fields, "bnb_4bit_use_double_quant", False)
    kind = fields.text("bnb_4bit_quant_type", default="fp4")
    scheme = schemes.bnb4(kind, double=double).with_tensors(*schemes.bnb4_tables(double=double))
    return Quantization("nf4", scheme, wide(skipped), roles)


def mlx(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """MLX: every linear layer and the embedding, with overrides under a module's own name."""
    bits, size = bits_of(fields, "bits"), group_of(fields, "group_size", default=64)
    mode = str(fields.data.get("mode") or "affine")
    rules: list[Rule] = []
    kept = [name for name, value in fields.data.items() if value is False and "." in name]
    same: dict[tuple[int, int, str], list[str]] = {}
    for name, value in fields.data.items():
        if isinstance(value, dict):
            own = Fields(value, fields.name(name))
            key = (
                bits_of(own, "bits", default=bits),
                group_of(own, "group_size", default=size),
                str(own.data.get("mode") or mode),
            )
            same.setdefault(key, []).append(name)
    for key, names in same.items():
        rules.append(Rule(Modules(names, fields.where), schemes.mlx(*key)))
    rules += wide(Modules(kept, fields.where))
    return Quantization(
        "mlx", schemes.mlx(bits, size, mode), tuple(rules), EVERY | {"embedding"}, least_columns=max(size, 1)
    )


def eetq(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    scheme = schemes.integers(8, 1, 0)
    return Quantization(
        "int8",
        replace(scheme, source="EETQ: int8 weights with a 16-bit scale a row"),
        wide(modules(fields, "modules_to_not_convert")),
    )


def hqq(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """HQQ (https://mobiusml.github.io/hqq_blog/): a 16-bit scale and a 16-bit zero for each group."""
    fields.ignore("quant_config")
    outer = fields.data.get("quant_config")
    inner = outer.get("weight_quant_params", outer) if isinstance(outer, dict) else {}
    own = Fields(inner if isinstance(inner, dict) else {}, fields.name("quant_config"))
    bits, size = bits_of(own, "nbits"), group_of(own, "group_size", default=64)
    pair = (
        (Tensor("scales", 16, flat=size), Tensor("zeros", 16, flat=size))
        if size > 0
        else (Tensor("scales", 16, 1, 0), Tensor("zeros", 16, 1, 0))
    )
    values = schemes.values(bits)
    if bits == 3 and size > 0:  # ten groups lie in as many 32-bit words as a group has values
        values = Tensor("", 32 * size, flat=10 * size)
    scheme = Scheme(
        f"hqq-int{bits}",
        (values, *pair),
        schemes.BF16_COMPUTE,
        "HQQ: half-quadratic quantisation",
        "https://mobiusml.github.io/hqq_blog/",
        value_bits=bits,
    )
    return Quantization("hqq", scheme, wide(modules(fields, "skip_modules")))


def aqlm(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """AQLM (arXiv 2401.06118): codes of groups of inputs into codebooks, and a scale a row."""
    inputs, outputs = (
        fields.size("in_group_size", default=8, high=64),
        fields.size("out_group_size", default=1, high=64),
    )
    books, bits = (
        fields.size("num_codebooks", default=1, high=16),
        fields.size("nbits_per_codebook", default=16, high=16),
    )
    stored = 8 if bits <= 8 else 16  # codes lie in whole bytes
    tensors = (
        Tensor("", books * stored, outputs, inputs),
        Tensor("codebooks", books * 2**bits * inputs * outputs * 16, 0, 0),
        Tensor("scales", 16, outputs, 0),
    )
    scheme = Scheme(
        f"aqlm-{books}x{bits}",
        tensors,
        schemes.BF16_COMPUTE,
        "AQLM, arXiv 2401.06118",
        "https://arxiv.org/abs/2401.06118",
    )
    skipped = modules(fields, "linear_weights_not_to_quantize")
    return Quantization("aqlm", scheme, wide(skipped))


_TORCHAO = (
    # the beginning of the configuration's name, bits, rows and columns of a scale (-1: the group), matmuls in 8 bits
    ("int4weightonly", 4, 1, -1, False),
    ("int8weightonly", 8, 1, 0, False),
    ("int8dynamicactivationint8", 8, 1, 0, True),
    ("int8dynamicactivationint4", 4, 1, -1, False),
    ("int8dynamicactivationintx", 8, 1, -1, True),  # a byte a value, however few bits it uses
    ("intxweightonly", 8, 1, -1, False),
    ("float8", 8, 1, 0, True),
)


def torchao(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    """torchao: the configuration is a name, or an object that names its class and holds its arguments."""
    fields.ignore("quant_type", "quant_type_kwargs", "untie_embedding_weights")
    given = fields.data.get("quant_type")
    data = given.get("default", given) if isinstance(given, dict) else {}
    name = str(data.get("_type", given) if isinstance(data, dict) else given)
    arguments = data.get("_data", {}) if isinstance(data, dict) else {}
    if isinstance(fields.data.get("quant_type_kwargs"), dict):
        arguments = fields.data["quant_type_kwargs"]
    own = Fields(arguments if isinstance(arguments, dict) else {}, fields.name("quant_type"))
    letters = name.lower().replace("_", "")
    size = _torchao_group(own, letters)
    row = next((row for row in _TORCHAO if letters.startswith(row[0])), None)
    if row is None:
        raise InputError.of(
            fields.name("quant_type"), name, "it must begin with int4, int8, intx or float8, as torchao names it"
        )
    _, bits, rows, columns, quick = row
    url = "https://github.com/pytorch/ao"
    if letters.startswith("float8"):
        scheme = schemes.fp8(1 if "row" in str(arguments).lower() else 0, 0, weight_only="weightonly" in letters)
    else:
        zeros = 16 if bits == 4 and not letters.startswith("int8dyn") else 0
        scale = 16
        if bits == 8 and (columns < 0 or (isinstance(data, dict) and data.get("_version") == 2)):
            zeros, scale = 8, 16 if columns < 0 else 32  # a zero of each scale, also where the values are symmetric
        columns = size if columns < 0 else columns
        scheme = schemes.integers(bits, rows, columns, scale_bits=scale, zero_bits=zeros, dynamic=quick)
    scheme = replace(scheme, source=f"torchao: {name[:60]}", url=url)
    roles = LINEAR | _ENDS if flag_of(fields, "include_input_output_embeddings", False) else LINEAR
    return Quantization("torchao", scheme, wide(modules(fields, "modules_to_not_convert")), roles)


def _torchao_group(own: Fields, letters: str) -> int:
    """The inputs of a group: `group_size`, or that of `weight_granularity` or `granularity`, whose class may also be a row's."""
    for key in ("weight_granularity", "granularity"):
        given = own.data.get(key)
        if "intx" in letters and isinstance(given, dict):
            inside = given.get("_data")
            nested = Fields(inside if isinstance(inside, dict) else {}, own.name(key))
            return group_of(nested, "group_size", default=-1)
    return group_of(own, "group_size", default=128)


def bitnet(fields: Fields, config: Mapping[str, Any]) -> Quantization:
    scheme = Scheme(
        "bitnet",
        (schemes.values(2), Tensor("scales", 16, 0, 0)),
        schemes.BF16_COMPUTE,
        "BitNet b1.58, arXiv 2402.17764: four ternary values a byte",
        "https://arxiv.org/abs/2402.17764",
    )
    return Quantization("bitnet", scheme, wide(modules(fields, "modules_to_not_convert")))
