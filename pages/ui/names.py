"""The names that people know: models and GPUs as their makers write them, grouped by family; links and commands keep the ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from calc.catalogue import Entry, catalogue
from calc.hardware import Gpu, gpus

_FIRST = (
    "llama",
    "qwen",
    "gpt-oss",
    "deepseek",
    "gemma",
    "mistral",
    "mixtral",
    "phi",
    "glm",
    "kimi",
)  # families asked for most
_DROPPED = re.compile(r"^Meta-|-hf$", re.IGNORECASE)


def _model(entry: Entry) -> str:
    """`Llama 3.1 8B` of `meta-llama/Meta-Llama-3.1-8B`."""
    name = _DROPPED.sub("", entry.hub_id.rpartition("/")[2]).replace("_", ".").replace("-", " ")
    return re.sub(r"(?<=\d)b\b", "B", name).replace("gpt oss", "gpt-oss")


def _device(gpu: Gpu) -> str:
    """`NVIDIA H100 SXM 80 GB` of the catalogue's title."""
    return re.sub(r"(\d)GB", r"\1 GB", gpu.title)


def _family(name: str) -> tuple[int, str]:
    plain = _plain(name)
    at = next((place for place, family in enumerate(_FIRST) if plain.startswith(family)), len(_FIRST))
    return at, re.split(r"[-\d]", plain)[0]


def _plain(name: str) -> str:
    return name.removeprefix("meta-").replace("_", ".")


def _newest(name: str) -> list[tuple[int, float, str]]:
    """Versions count down within a family, sizes up."""
    parts = re.findall(r"\d+(?:\.\d+)?|[a-z]+", _plain(name))
    return [(0, -float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]


def models(entries: Mapping[str, Entry]) -> list[str]:
    """Ids of the catalogue, by family: those asked for most first, the newest version first."""
    return sorted(entries, key=lambda name: (*_family(name), _newest(name)))


def devices(found: Iterable[str]) -> list[str]:
    """Ids of GPUs in the order of the file: by maker, the newest first."""
    return list(found)


MODELS: Mapping[str, str] = {
    **{name: _model(entry) for name, entry in catalogue().items()},
    "hugging-face": "Another model of the Hugging Face Hub …",
    "custom": "My own config.json …",
}
DEVICES: Mapping[str, str] = {
    **{name: _device(gpu) for name, gpu in gpus().items()},
    "custom": "My own figures …",
}
