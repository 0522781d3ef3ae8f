"""What a checkpoint declares of its weights, and the reading of the fields that most methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from calc.errors import InputError
from calc.model.fields import Fields
from calc.quantization.modules import Modules, Role, Site
from calc.quantization.schemes import Scheme

NOTHING: Final = Modules((), "")
LINEAR: Final[frozenset[Role]] = frozenset(("linear", "expert"))


@dataclass(frozen=True, slots=True)
class Rule:
    """Modules that are stored by another scheme than the rest; None: as they are."""

    modules: Modules
    scheme: Scheme | None


@dataclass(frozen=True, eq=False)
class Quantization:
    """What a checkpoint declares of its weights: `scheme` for every module in `roles` that no rule names, and the rest as it is.

    `family` is the name of `--weights` whose details these are. `wide_bits`: what the rest is stored in, 0 where the config's dtype
    tells. `kv_dtype` is the declared format of the cache, "" where there is none, and `kv_scale_bits` those of its two stored
    scales a layer. `in_experts`: only routed experts are quantised, where the model has any.
    """

    family: str
    scheme: Scheme
    rules: tuple[Rule, ...] = ()
    roles: frozenset[Role] = LINEAR
    in_experts: bool = False
    kv_dtype: str = ""
    kv_scale_bits: int = 0
    wide_bits: int = 0
    least_columns: int = 1  # a layer whose input features this does not divide stays as it is
    notes: tuple[str, ...] = ()

    def scheme_of(self, where: Site, roles: frozenset[Role]) -> Scheme | None:
        """The scheme of a module, where those in `roles` have the general one; None where it is stored as it is."""
        for rule in self.rules:
            if rule.modules.means(where):
                return rule.scheme
        return self.scheme if where.role in roles else None

    @property
    def by_layer(self) -> bool:
        """Whether any rule is for some layers alone."""
        return any(rule.modules.by_layer for rule in self.rules)

    @property
    def label(self) -> str:
        """The format in a few words: the scheme, its group, and what is apart from it."""
        scales = self.scheme.tensors[1] if len(self.scheme.tensors) > 1 else None
        if scales is None or scales.flat:
            return self.scheme.label
        if scales.rows > 1:
            return f"{self.scheme.label} ({scales.rows} x {scales.columns} blocks)"
        if scales.columns > 1:
            return f"{self.scheme.label} (groups of {scales.columns})"
        return f"{self.scheme.label} ({'a scale a row' if scales.rows else 'a scale a tensor'})"


def modules(fields: Fields, *keys: str) -> Modules:
    """The modules that a list of the declaration names."""
    found: list[Any] = []
    for key in keys:
        fields.ignore(key)
        value = fields.data.get(key)
        if value is None:
            continue
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list):
            raise InputError.of(fields.name(key), value, "it must be a list of module names")
        found += value
    return Modules(found, fields.name(keys[0])) if found else NOTHING


def bits_of(fields: Fields, *keys: str, default: int = 4) -> int:
    return fields.size(*keys, default=default, high=16) if fields.has(*keys) else default


def group_of(fields: Fields, *keys: str, default: int = 128) -> int:
    """The inputs of a group; -1 is one group for all."""
    return fields.size(*keys, default=default, low=-1, high=2**20) if fields.has(*keys) else default


def flag_of(fields: Fields, key: str, default: bool) -> bool:
    return fields.flag(key, default=default) if fields.has(key) else default


def wide(modules: Modules) -> tuple[Rule, ...]:
    """The rule that these modules stay as they are."""
    return (Rule(modules, None),) if modules else ()


def block_size(fields: Fields, key: str = "weight_block_size") -> tuple[int, int] | None:
    """(rows, columns) of a block; None where there are no blocks."""
    fields.ignore(key)
    found = fields.data.get(key)
    if found is None:
        return None
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(side) is int and 0 < side <= 2**20 for side in found)
    ):
        raise InputError.of(fields.name(key), found, "it must be two whole numbers, the rows and columns of a block")
    return found[0], found[1]


_KV = {"fp8": "fp8", "float8": "fp8", "fp8-e4m3": "fp8", "int8": "int8", "nvfp4": "", "none": "", "auto": ""}


def kv_of(fields: Fields, *keys: str) -> str:
    """The declared format of the cache: an algorithm's name, or a scheme with its bits."""
    for key in keys or ("kv_cache_quant_algo", "kv_cache_scheme", "kv_cache_dtype"):
        fields.ignore(key)
        found = fields.data.get(key)
        if isinstance(found, dict):
            number, kind = found.get("num_bits"), found.get("type", "float")
            if number == 8:
                return "fp8" if kind == "float" else "int8"
        elif isinstance(found, str):
            return _KV.get(found.lower().replace("_", "-"), "")
    return ""
