"""MODEL, wherever it is: a file, a folder, a GGUF or safetensors file, standard input, or the Hugging Face Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from calc.errors import InputError
from calc.model.config import from_config
from calc.model.spec import ModelSpec
from calc.sources.files import open_plain, read_config, read_standard_input
from calc.sources.stored import StoredTensors, role_of

ADAPTER = "adapter_config.json"
ON_HUB: Final = "hub:"  # before an id: it is never a path, whatever lies here
WEIGHTS = (".gguf", ".safetensors", ".safetensors.index.json")


@dataclass(frozen=True, slots=True)
class Found:
    """What MODEL turned out to be.

    `config` is None where a file of weights has none, and `problem` says why. `stored`: what the checkpoint stores, None where it
    was not asked for or there is none. `weights_named`: MODEL named the file of weights itself. `whole`: the class must have
    exactly the parameters stored, or the config is wrong. `assumptions` tell where the config is from.
    """

    name: str
    config: dict[str, Any] | None
    stored: StoredTensors | None = None
    weights_named: bool = False
    problem: str = ""
    whole: bool = False
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def needed_config(self) -> dict[str, Any]:
        """The config. InputError where there is none."""
        if self.config is None:
            raise InputError(self.problem, "MODEL")
        return self.config

    def spec(self) -> ModelSpec:
        """The model. InputError where there is no config, or none that is understood."""
        spec = from_config(self.needed_config(), self.name)
        if self.whole and self.stored:
            _check_whole(spec, self.stored)
        return replace(spec, assumptions=(*self.assumptions, *spec.assumptions), notes=(*spec.notes, *self.notes))


def _check_whole(spec: ModelSpec, stored: StoredTensors) -> None:
    """InputError unless the class has exactly the parameters that the file stores: only then was its metadata understood."""
    from calc.parameters import parameters

    total = parameters(spec).total
    held = sum(tensor.elements for tensor in stored.tensors if role_of(tensor) != "buffer")
    if held != total:
        raise InputError(
            f"MODEL: {stored.where}: read as {spec.architecture}, its metadata describes {total:,} parameters and it stores "
            f"{held:,}, so it is another model; give that model's config.json",
            "MODEL",
        )


def find(model: str, stored: bool = False) -> Found | None:
    """What MODEL is, outside the catalogue; None when it is neither a path nor a Hugging Face id.

    A path that exists wins over an id; `hub:owner/name` is an id always. `stored` asks for what the checkpoint stores as well. InputError
    when it cannot be read.
    """
    from calc.sources.hub import needed_id, parse_id

    if model.startswith(ON_HUB):
        from calc.sources.hub_weights import find_on_hub

        return find_on_hub(needed_id(model.removeprefix(ON_HUB)), stored)
    if model == "-":
        return Found("standard input", read_standard_input())
    if not model.strip():
        return None
    if "\0" in model:
        raise InputError.of("MODEL", model, "a path holds no NUL")
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise InputError.of("MODEL", model, "there is no such user") from None
    hub_id = parse_id(model)
    looks = model.endswith((".json", ".yml", ".yaml", *WEIGHTS)) and not (hub_id and hub_id.file)
    if os.path.lexists(path) or looks or model.startswith((".", "/", "~")):
        return find_at(path, stored)
    if not hub_id:
        return None
    from calc.sources.hub_weights import find_on_hub

    return find_on_hub(hub_id, stored)


def find_at(path: Path, stored: bool = False) -> Found:
    """What lies at a path: a config.json, a folder that holds one, or a file of weights."""
    if path.name.endswith(".gguf"):
        return _gguf(path)
    if path.name.endswith(WEIGHTS):
        return _safetensors(path, stored)
    if path.name == ADAPTER:
        return _adapter(path.parent)
    if not os.path.isdir(path):
        name = path.absolute().parent.name if path.name == "config.json" else path.stem
        return Found(name, read_config(path))
    if os.path.lexists(path / ADAPTER):
        return _adapter(path)
    from calc.sources.safetensors import weights_of

    weights = weights_of(path) if stored else None
    held, notes = _held(weights) if weights else (None, ())
    return Found(path.absolute().name, read_config(path), held, notes=notes)


def _held(weights: Path) -> tuple[StoredTensors | None, tuple[str, ...]]:
    """What weights store, or a note on what is known of them where they are not here whole."""
    from calc.sources.pointers import absent_weights
    from calc.sources.safetensors import read_safetensors

    note = absent_weights(weights)
    return (None, (note,)) if note else (read_safetensors(weights), ())


def _adapter(folder: Path) -> Found:
    """An adapter's folder: the model under it, with what the adapter adds."""
    from calc.sources.adapters import adapter_in, adapter_note, base_config

    adapter = adapter_in(folder)
    assert adapter is not None  # its file is there
    config, where = base_config(folder, adapter)
    base = str(adapter.get("base_model_name_or_path"))[:120]
    note = adapter_note(adapter, from_config(config, base))
    return Found(folder.absolute().name, config, assumptions=(f"config = that of {base} ({where})",), notes=(note,))


def _gguf(path: Path) -> Found:
    from calc.sources.gguf import read_gguf
    from calc.sources.pointers import refuse_pointer

    refuse_pointer(path)
    return found_gguf(read_gguf(path), path.name, path.stem)


def found_gguf(header: Any, where: str, name: str, assumptions: tuple[str, ...] = ()) -> Found:
    """What a GGUF header describes."""
    from calc.sources.gguf import stored_gguf
    from calc.sources.gguf_config import config_of

    stored = stored_gguf(header, where)
    told = (*assumptions, f"config read from the metadata of {where}")
    try:
        return Found(name, config_of(header, where), stored, True, whole=True, assumptions=told)
    except InputError as error:
        return Found(name, None, stored, True, str(error))


def _safetensors(path: Path, stored: bool) -> Found:
    with open_plain(path):
        name = path.absolute().parent.name if path.name.startswith("model.safetensors") else path.stem
    held, notes = _held(path) if stored else (None, ())
    config = path.parent / "config.json"
    if os.path.lexists(config):
        return Found(name, read_config(config), held, True, assumptions=(f"config read from {config}",), notes=notes)
    problem = f"MODEL: {str(path)!r} has no config.json next to it, which alone says what class its tensors belong to"
    return Found(name, None, held, True, "; ".join((problem, *notes)))
