"""Every config of the catalogue counts what the class it names holds, to the parameter."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalogue import catalogue, load, load_config
from calc.model.spec import ModelSpec
from calc.parameters import parameters
from tests.calc.model.meta_model import build, count
from tests.calc.model.reference_class import TWINS
from tests.recorded.class_counts import catalogue_count

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames fields of published configs

# classes that no transformers class mirrors whole: their own tests below
OWN = {"mimo-7b-base", "llama-3_3-nemotron-super-49b-v1", "gemma-3n-e2b-it", "gemma-3n-e4b-it"}


@pytest.mark.recorded
@pytest.mark.parametrize("name", [name for name in catalogue() if name not in OWN])
def test_the_count_equals_the_class_on_the_meta_device(name):
    config = load_config(name)
    class_name, fields = TWINS.get(name, (config["architectures"][0], {}))
    counts, spec = catalogue_count(name, class_name, config | fields), load(name)
    assert parameters(spec).total == counts["total"]
    vision = sum(_tower(spec, tower.name) for tower in spec.towers if tower.name == "vision")
    assert vision == counts["vision"]
    if name != "clip-vit-large-patch14":  # CLIP names no one embedding as its input
        assert spec.embeddings[0].parameters == counts["embedding"]
        assert sum(weight.parameters for weight in spec.head) == counts["head"]


def _tower(spec: ModelSpec, name: str) -> int:
    node = parameters(spec).breakdown.root.child(name)
    return int(node.total)


@pytest.mark.torch
def test_mimo_is_qwen2_with_a_layer_that_predicts_the_next_token():
    config = load_config("mimo-7b-base")
    main = count(build("Qwen2ForCausalLM", config))
    # modeling_mimo.py, MiMoMTPLayers: a Qwen2 layer, three more norms and a projection from 2 h to h
    layer = count(build("Qwen2ForCausalLM", config | {"num_hidden_layers": 1})) - count(
        build("Qwen2ForCausalLM", config | {"num_hidden_layers": 0})
    )
    h = config["hidden_size"]
    assert parameters(load("mimo-7b-base")).total == main + layer + 3 * h + 2 * h * h


@pytest.mark.torch
def test_nemotron_nas_is_llama_layer_by_layer():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = load_config("llama-3_3-nemotron-super-49b-v1")
    h, total = config["hidden_size"], 2 * config["vocab_size"] * config["hidden_size"] + config["hidden_size"]
    for block in config["block_configs"]:
        group = block["attention"]["n_heads_in_group"] or config["num_attention_heads"]
        width = -(-int(2 * block["ffn"]["ffn_mult"] * h / 3) // 256) * 256
        layer = _on_meta(
            LlamaDecoderLayer,
            LlamaConfig(
                hidden_size=h,
                intermediate_size=width,
                num_attention_heads=config["num_attention_heads"],
                num_key_value_heads=config["num_attention_heads"] // group,
            ),
        )
        if block["attention"]["no_op"]:
            del layer.self_attn, layer.input_layernorm
        total += count(layer)
    assert parameters(load("llama-3_3-nemotron-super-49b-v1")).total == total


def _on_meta(layer_class: Any, config: Any) -> Any:
    import torch

    with torch.device("meta"):
        return layer_class(config, 0)
