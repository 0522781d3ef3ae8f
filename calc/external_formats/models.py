"""The model that a run names, as MODEL of the command line: the catalogue's name, or the id or path as it stands."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from calc.catalogue import catalogue
from calc.external_formats.draft import Draft

# What tells tuned copies of one shape apart. Quantised copies are not among them: their weights take other bytes.
_TUNED: Final = re.compile(r"[-_.](instruct|it|chat|hf|base|fp16|bf16|\d{4})(?=[-_.]|$)")


@lru_cache(maxsize=1)
def _by_id() -> dict[str, str]:
    return {entry.hub_id.lower(): entry.name for entry in catalogue().values()}


@lru_cache(maxsize=1)
def _by_shape() -> dict[str, str]:
    rows = [(shape_of(entry.hub_id), entry.name) for entry in catalogue().values()]
    return dict(reversed(rows))


def shape_of(name: str) -> str:
    """A model's name without its owner, and without what tells tuned copies of one shape apart."""
    last = name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-")
    last = last.removesuffix(".gguf").removesuffix("-gguf")  # whose format the run names itself
    while last != (last := _TUNED.sub("", last)):
        pass
    return last


def resolve(draft: Draft) -> None:
    """Put the catalogue's name in the place of the model's, and say what was assumed."""
    said = draft.model
    if not said:
        draft.assumed.append("model: the text names none; give MODEL to the command")
    elif said.lower() in _by_id():
        draft.model = _by_id()[said.lower()]
    elif said in catalogue() or "model_config" in draft.facts:
        return
    elif shape_of(said) in _by_shape():
        draft.model = _by_shape()[shape_of(said)]
        draft.assumed.append(f"model {draft.model}: {said} has its shape")
    else:
        draft.assumed.append(
            f"model {said}: not in the catalogue; its config is read from that path or Hugging Face id"
        )
