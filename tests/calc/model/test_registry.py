"""Every causal-LM class that transformers offers: its default config is counted exactly or refused, never counted wrong."""

from __future__ import annotations

from typing import Any

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from tests.calc.model.reference_class import build, count

pytestmark = pytest.mark.torch

# What a class builds and neither fills nor runs: LongCat-Flash's first projections of 256 zero experts in 28 layers
UNUSED = {"LongcatFlashForCausalLM": 28 * 256 * 2 * 2048 * 6144}


def _default_configs() -> dict[str, dict[str, Any]]:
    """The default config of each class, as its `to_dict` writes it. A class whose own default is broken has none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {}
    for name in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
        try:
            found[name] = getattr(transformers, name).config_class().to_dict() | {"architectures": [name]}
        except Exception:  # whatever its own code raises: nothing to count
            continue
    return found


def test_the_default_config_of_every_class_is_exact_or_refused(capsys):
    exact, refused, wrong, broken, text_alone = [], [], [], [], []
    for name, config in _default_configs().items():
        try:
            model = build(name, config)
        except Exception:  # whatever its own code raises: nothing to compare with
            broken.append(name)
            continue
        try:
            spec = from_config(config)
            ours = parameters(spec).total
        except InputError:
            refused.append(name)
            continue
        if any(note.startswith(f"{name} is not understood: counted is its text model") for note in spec.notes):
            text_alone.append(name)
            assert ours <= count(model), name
            continue
        (exact if ours + UNUSED.get(name, 0) == count(model) else wrong).append(name)
    with capsys.disabled():
        print(
            f"\ncausal-LM classes of transformers: {len(exact)} exact, {len(refused)} refused, {len(wrong)} wrong, "
            f"{len(text_alone)} counted for their text model alone, "
            f"{len(broken)} that transformers itself cannot build"
        )
    assert wrong == []
    assert len(exact) >= 150
