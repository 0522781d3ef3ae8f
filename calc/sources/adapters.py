"""A folder that holds an adapter: what `adapter_config.json` says, the model under it, and what the adapter adds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from calc.errors import InputError
from calc.lora import lora_parameters
from calc.model.config import parse_config
from calc.model.fields import Fields
from calc.model.spec import ModelSpec
from calc.sources.files import open_plain, read_config
from calc.sources.find import ADAPTER

if TYPE_CHECKING:
    from calc.catalogue import Entry

_LARGEST: Final = 2**20
_CONVERSIONS: Final = ("-unsloth-bnb-4bit", "-bnb-4bit", "-hf", "-unsloth")


def adapter_in(folder: Path) -> dict[str, Any] | None:
    """The adapter's config of a folder; None where it holds none."""
    if not os.path.lexists(folder / ADAPTER):
        return None
    with open_plain(folder / ADAPTER, _LARGEST) as (file, size):
        return parse_config(file.read(size))


def base_config(folder: Path, adapter: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The config of the model under an adapter: that of its folder, else the catalogue's of that name. A path that the adapter names
    is never followed. InputError where neither is there."""
    from calc.catalogue import catalogue, load_config

    named = adapter.get("base_model_name_or_path")
    if os.path.lexists(folder / "config.json"):
        return read_config(folder), "the config.json of its folder"
    known = _catalogued(str(named), catalogue().values())
    if known is None:
        raise InputError(
            f"base_model_name_or_path: {str(named)[:120]!r} is the model of this adapter, and the catalogue has none of that name; "
            f"put its config.json into the folder of {ADAPTER}",
            "base_model_name_or_path",
        )
    return load_config(known), f"the catalogue's {known}"


def _catalogued(named: str, entries: Iterable[Entry]) -> str | None:
    """The catalogue's name of a model: by its id, or by the end of it without what conversions add."""
    last = named.rstrip("/").rsplit("/", 1)[-1].lower()
    plain = next((last.removesuffix(end) for end in _CONVERSIONS if last.endswith(end)), last)
    wanted = {named.lower(), last, plain} - {""}
    return next((entry.name for entry in entries if wanted & {entry.name, entry.hub_id.lower()}), None)


def adapter_note(adapter: dict[str, Any], spec: ModelSpec) -> str:
    """What the adapter is and adds: method, rank, targets, parameters, and bytes to keep it next to its model when serving."""
    fields = Fields(adapter)
    kind = str(adapter.get("peft_type") or "LORA")
    if kind.upper() != "LORA":
        raise InputError.of("peft_type", kind, "only LORA (DoRA with use_dora) is understood")
    rank = fields.size("r", high=65536)
    targets = adapter.get("target_modules")
    wanted = targets if isinstance(targets, str) else ",".join(map(str, targets)) if isinstance(targets, list) else ""
    if not 0 < len(wanted) <= 5000:
        raise InputError.of("target_modules", targets, 'it must be "all-linear" or a list of module names')
    count = lora_parameters(spec, rank, wanted)
    method = "LoRA"
    if adapter.get("use_dora") is True:
        count, method = count + _magnitudes(spec, wanted), "DoRA"
    saved, extra = adapter.get("modules_to_save") or [], ""
    if isinstance(saved, list) and saved:
        more = _saved(spec, {str(name) for name in saved})
        count += more
        extra = f", with {', '.join(map(str, saved))[:100]} trained and saved whole ({more:,})"
    return (
        f"adapter: {method} of rank {rank} on {wanted[:120]} has {count:,} parameters{extra}: serving keeps {2 * count:,} bytes more "
        "in 16 bits, or none once it is merged"
    )


def _magnitudes(spec: ModelSpec, targets: str) -> int:
    """DoRA's magnitude for each output of a target: what one more unit of rank adds on the output's side."""
    names = None if targets == "all-linear" else set(targets.split(","))
    kinds = zip(spec.layers.kind_parts, spec.layers.counts, strict=True)
    return sum(
        times * part.copies * weight.shape[0].size
        for parts, times in kinds
        for part in parts
        for weight in part.weights
        if weight.matmul and weight.module and (names is None or weight.module in names)
    )


def _saved(spec: ModelSpec, names: set[str]) -> int:
    """Parameters of the modules that are saved whole: the embedding and the head."""
    total = sum(
        weight.parameters for weight in spec.embeddings if names & {"embed_tokens", "wte"} and weight.name == "token"
    )
    if names & {"lm_head", "embed_out"}:
        head = sum(weight.parameters for weight in spec.head)
        total += head or sum(weight.parameters for weight in spec.embeddings if weight.name == "token")
    return total
