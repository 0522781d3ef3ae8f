"""The defaults that stand in for missing fields are those of the installed transformers."""

from __future__ import annotations

import pytest

from calc.model.config import from_config
from measure.class_defaults import FILE, text


@pytest.mark.torch
def test_the_file_of_class_defaults_is_what_transformers_says():
    assert FILE.read_text() == text(), "run python -m measure.class_defaults"


def test_a_missing_field_takes_the_default_of_its_class_and_says_so():
    config = {
        "architectures": ["MistralForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    }
    spec = from_config(config)
    assert spec.layers.kinds[0].mixer.num_key_value_heads == 8
    assert "num_key_value_heads = 8 (not in the config; the model class's default)" in spec.assumptions
