"""transformers' `from_pretrained`, by config alone: a model is built from its config and gets no weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from calc.catalogue import catalogue, load_config
from measure.script.make_believe_gpu import Patches

_NOT_OF_THE_CLASS = ("auto_map", "quantization_config", "transformers_version", "_name_or_path", "model_type")


class NoConfig(OSError):
    """A model of which neither a folder nor the catalogue has the config."""


def weights_from_config(patches: Patches, note: Callable[[str], None]) -> None:
    """Let `from_pretrained` of models and configs take the config from a local folder or the catalogue."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def config(kind: Any, name: Any, /, **kwargs: Any) -> Any:
        return _config(str(name))

    def model(kind: Any, name: Any = None, /, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if kwargs.get("quantization_config") is not None:
            raise NotImplementedError(
                "from_pretrained(quantization_config=...) is not traced; `plumbline trace MODEL --method qlora` is"
            )
        found = config if config is not None else _config(str(name))
        note(f"from_pretrained is from_config: {name} gets no weights")
        return _built(kind, found, kwargs)

    # each class of modeling_auto has a copy of its own
    autos = [each for each in vars(modeling_auto).values() if isinstance(each, type)]
    for built in (transformers.PreTrainedModel, *(each for each in autos if issubclass(each, _BaseAutoModelClass))):
        patches.set(built, "from_pretrained", classmethod(model))
    for owner in (transformers.AutoConfig, transformers.PretrainedConfig):
        patches.set(owner, "from_pretrained", classmethod(config))


def _config(name: str) -> Any:
    """The config of a folder, or of the catalogue by its name or the end of its Hugging Face id."""
    from transformers import AutoConfig

    folder = Path(name)
    if (folder / "config.json").is_file():
        raw = load_config(str(folder))
    else:
        known = name.rpartition("/")[2].lower()
        known = next((each for each in (known, known.removesuffix("-hf")) if each in catalogue()), "")
        if not known:
            raise NoConfig(f"no folder {name} holds a config.json, and the catalogue has no model of that name")
        raw = load_config(known)
    values = {key: value for key, value in raw.items() if key not in _NOT_OF_THE_CLASS}
    return AutoConfig.for_model(raw["model_type"], **values)


def _built(kind: Any, config: Any, asked: dict[str, Any]) -> Any:
    """The model in the format that was asked for, "auto" being the config's, where `device_map` says."""
    dtype = asked.get("dtype") or asked.get("torch_dtype") or "auto"
    if dtype == "auto":
        dtype = config.dtype or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    attention = asked.get("attn_implementation")
    build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    model = build(config, dtype=dtype, **({"attn_implementation": attention} if attention else {}))
    model.eval()
    return model if asked.get("device_map") in (None, "cpu") else model.to("cuda")
