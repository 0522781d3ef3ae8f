"""Other programs' files and half a checkout: what is read, what is said, and what is refused in one line."""

from __future__ import annotations

import json

import pytest

from calc.cli import run
from calc.errors import InputError
from calc.model.config import from_config, parse_config
from calc.parameters import parameters
from calc.sources.files import parse_yaml

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234\n".format("0" * 64)


def total(config):
    return parameters(from_config(config)).total


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # state-spaces/mamba-130m and mamba2-130m, their own config.json
        (
            {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "pad_vocab_size_multiple": 8},
            129_135_360,
        ),
        (
            {
                "d_model": 768,
                "n_layer": 24,
                "vocab_size": 50277,
                "ssm_cfg": {"layer": "Mamba2"},
                "pad_vocab_size_multiple": 16,
            },
            128_989_632,
        ),
        # EleutherAI/pythia, models/160M/pythia-160m.yml
        (
            {
                "num-layers": 12,
                "hidden-size": 768,
                "num-attention-heads": 12,
                "pos-emb": "rotary",
                "seq-length": 2048,
                "no-weight-tying": True,
                "gpt-j-residual": True,
                "rotary-pct": 0.25,
                "norm": "layernorm",
            },
            162_322_944,
        ),
        # meta-llama/Llama-2-7b, params.json, with the tokenizer's vocabulary
        (
            {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": 32000},
            6_738_415_616,
        ),
        # Megatron-LM's names for Llama-2-7B
        (
            {
                "num_layers": 32,
                "hidden_size": 4096,
                "ffn_hidden_size": 11008,
                "num_attention_heads": 32,
                "swiglu": True,
                "normalization": "RMSNorm",
                "position_embedding_type": "rope",
                "disable_bias_linear": True,
                "untie_embeddings_and_output_weights": True,
                "padded_vocab_size": 32000,
            },
            6_738_415_616,
        ),
    ],
)
def test_another_programs_config_is_the_model_that_it_describes(config, count):
    assert total(config) == count


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(LLAMA)[:-1] + ",\n}",
        f"[INFO|configuration_utils.py:731] Model config LlamaConfig {json.dumps(LLAMA)}\nloading weights",
        repr({**LLAMA, "pad_token_id": None, "use_cache": True}),
    ],
)
def test_a_pasted_config_is_read(text):
    assert total(parse_config(text)) == total(LLAMA)


@pytest.mark.parametrize(
    "text", ["{", json.dumps(LLAMA)[:-20], "{'a': __import__('os')}", "{" * 100_000, "NaN", POINTER]
)
def test_what_is_no_config_is_refused(text):
    with pytest.raises(InputError):
        parse_config(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: [*a, *a]",
        "a: !!python/object/apply:os.system ['true']",
        "- 1",
        "a: [",
        "\x00",
        "[" * 50_000,
        "a: " + "x" * 2**17,
    ],
)
def test_a_yaml_bomb_or_anything_else_is_refused(text):
    with pytest.raises(InputError, match="config"):
        parse_yaml(text.encode())


def test_an_adapters_folder_is_its_base_with_what_the_adapter_adds(tmp_path):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama-2-7b-hf", "r": 16}
    adapter |= {"target_modules": ["q_proj", "v_proj"], "use_dora": True, "modules_to_save": ["lm_head"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    answer = json.loads(run(["params", str(tmp_path), "--format", "json"]))
    added = 32 * 2 * 16 * (4096 + 4096) + 32 * 2 * 4096 + 32000 * 4096
    assert answer["total"] == 6_738_415_616
    assert any(f"{added:,} parameters" in note and f"{2 * added:,} bytes" in note for note in answer["notes"])


@pytest.mark.parametrize("named", ["../elsewhere", "/etc/passwd", "nobody/nothing"])
def test_an_adapter_leads_nowhere(tmp_path, named):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": named, "r": 16, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(InputError, match="base_model_name_or_path"):
        run(["params", str(tmp_path)])


def test_a_pointer_in_place_of_a_shard_is_told(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "a.safetensors").write_text(POINTER)
    index = {"metadata": {"total_size": 99}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    notes = json.loads(run(["params", str(tmp_path), "--format", "json"]))["notes"]
    assert any("1 of its 2 shards are not here" in note and "pointers to 1,234 bytes" in note for note in notes)


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "linear", "factor": 2.0}, 4096),
        ({"type": "dynamic", "factor": 8.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}, 2048),
        ({"type": "longrope", "long_factor": [1.0]}, 2048),
    ],
)
def test_rotary_scaling_stretches_the_positions(scaling, limit):
    spec = from_config({**LLAMA, "max_position_embeddings": 2048, "rope_scaling": scaling})
    assert spec.beyond_positions("context", limit) == []
    assert spec.beyond_positions("context", limit + 1)
