"""Declared formats: what each method's fields say of each module, against the tensors that the method's own program writes."""

from __future__ import annotations

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from calc.serving import ServingPlan, serve

H, F, V, L = 512, 1024, 640, 3
LINEARS = 4 * H * H + 3 * H * F
OUTPUTS, INPUTS = 5 * H + 2 * F, 6 * H + F  # features over the seven linear layers
WIDE = 2 * (2 * V * H + (2 * L + 1) * H)  # embedding, head and norms in 16 bits
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": V,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def stored(**declaration):
    """Bytes of the seven linear layers of each layer, where nothing else is quantised."""
    return stored_all(**declaration) - WIDE


def stored_all(key="quantization_config", **declaration):
    return parameters(from_config({**LLAMA, key: declaration})).stored_bytes


def ints(**weights):
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}}


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CASES = [
    # method and its fields, bytes of one layer's seven linear layers
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, LINEARS + LINEARS // 128**2 * 4),
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, LINEARS + 7 * 4),
    ({"quant_method": "fp8", "activation_scheme": "static"}, LINEARS + 7 * 8),
    ({"quant_method": "fbgemm_fp8"}, LINEARS + OUTPUTS * 4),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        LINEARS // 2 + LINEARS // 128 * 5 // 2 + 4 * INPUTS,
    ),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, LINEARS + OUTPUTS * 3 + 4 * INPUTS),
    (
        {"quant_method": "gptq", "bits": 3, "group_size": 64},
        LINEARS * 3 // 8 + LINEARS // 64 * 2 + LINEARS // 64 * 3 // 8 + 4 * INPUTS,
    ),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        LINEARS // 2 + LINEARS // 128 * 2,
    ),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}, LINEARS // 2 + LINEARS // 64 * 5 // 2),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, LINEARS + OUTPUTS * 4),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        LINEARS // 2 + LINEARS // 64 * 4 + 7 * 64,
    ),
    (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_type": "nf4",
        },
        LINEARS // 2 + LINEARS // 64 + LINEARS // (64 * 256) * 4 + 7 * (64 + 1024),
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": ints(strategy="group", group_size=32),
        },
        LINEARS // 2 + LINEARS // 32 * 2 + 7 * 16,
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": ["lm_head"],
            "config_groups": ints(num_bits=8, strategy="channel"),
        },
        LINEARS + OUTPUTS * 2,
    ),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
                    "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
                }
            },
        },
        LINEARS // 2 + LINEARS // 16 + 7 * 8,
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, LINEARS + 7 * 8),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, LINEARS // 2 + LINEARS // 16 + 7 * 8),
    (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}, "quant_method": "modelopt"},
        LINEARS + 7 * 8,
    ),
    ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, LINEARS + OUTPUTS * 2),
    ({"quant_method": "eetq"}, LINEARS + OUTPUTS * 2),
    (
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
        LINEARS // 2 + LINEARS // 64 * 4,
    ),
    (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
        },
        LINEARS // 2 + LINEARS // 32,
    ),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, LINEARS // 2 + LINEARS // 128 * 5 // 2),
]


@pytest.mark.parametrize(
    ("declaration", "layer"),
    CASES,
    ids=[f"{at}-{row[0].get('quant_method', 'modelopt')}" for at, row in enumerate(CASES)],
)
def test_a_declared_format_stores_its_own_tensors(declaration, layer):
    assert stored(**declaration) == L * layer


def test_mlx_quantises_the_embedding_and_the_head_as_well():
    every = L * LINEARS + 2 * V * H
    assert stored_all("quantization", group_size=64, bits=4) == every // 2 + every // 64 * 4 + 2 * (2 * L + 1) * H


def test_mlx_reads_overrides_by_module_and_false_for_one_that_is_kept():
    same = stored_all("quantization", group_size=64, bits=4)
    more = stored_all(
        "quantization", group_size=64, bits=4, **{"model.layers.1.mlp.down_proj": {"group_size": 64, "bits": 8}}
    )
    kept = stored_all("quantization", group_size=64, bits=4, **{"model.layers.0.self_attn.q_proj": False})
    assert more - same == H * F // 2
    assert kept - same == 2 * H * H - (H * H // 2 + H * H // 64 * 4)


@pytest.mark.parametrize(
    ("ignored", "kept", "modules"),
    [
        ([], 0, 0),
        (["model.layers.1.self_attn.q_proj"], H * H, 1),
        (["re:.*self_attn.*"], L * 4 * H * H, L * 4),
        ([r"re:model\.layers\.[02]\.mlp\.(gate|up)_proj"], 4 * H * F, 4),
        (["model.layers.2.mlp*"], 3 * H * F, 3),
        (["*.mlp.down_proj"], L * H * F, L),
        (["model.layers.0"], LINEARS, 7),
        (["k_proj", "v_proj"], L * 2 * H * H, L * 2),
    ],
)
def test_what_a_list_names_stays_in_16_bits(ignored, kept, modules):
    def of(names):
        return stored(quant_method="fp8", modules_to_not_convert=["lm_head", *names])

    assert of(ignored) - of([]) == kept - 4 * modules


def test_a_pattern_that_would_backtrack_is_named_and_not_run():
    spec = from_config(
        {**LLAMA, "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["re:^(?!x)(a+)+$"]}}
    )
    assert any("is not read" in note for note in spec.notes)


def test_gptqmodel_reads_its_dynamic_rules():
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    rules = {r"-:model\.layers\.0\..*": {}, r"+:.*\.1\..*down_proj.*": {"bits": 8}}
    removed = LINEARS * 2 - (LINEARS // 2 + LINEARS // 128 * 5 // 2 + 4 * INPUTS)
    doubled = H * F // 2 + H * F // 128 // 2
    assert stored(**base, dynamic=rules) - stored(**base) == removed + doubled


def test_mixed_precision_takes_each_layers_own_algorithm():
    layers = {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    }
    rest = 2 * (L * LINEARS - 2 * H * F)
    found = stored(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found == rest + H * F + 8 + H * F // 2 + H * F // 16 + 8


def test_weights_overrides_the_declared_format_and_keeps_its_details_when_it_is_the_same():
    spec = from_config({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}})
    declared, same, other = (serve(spec, ServingPlan(weights=name)) for name in ("auto", "gptq-int4", "bf16"))
    assert declared.weights_bytes == same.weights_bytes < other.weights_bytes
    assert declared.format == "gptq-int4 (a scale a row), as the checkpoint declares"
    assert other.format == "bf16"


def test_a_declared_cache_format_is_taken():
    declaration = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    spec = from_config({**LLAMA, "quantization_config": declaration})
    declared, wide = (serve(spec, ServingPlan(kv_dtype=name)).kv_bytes_per_token for name in ("auto", "bf16"))
    assert wide == 2 * declared


@pytest.mark.parametrize(
    ("declaration", "named"), [({"quant_method": "exl9"}, "'exl9'"), ("exl9", "'exl9'"), ([], "'[]'")]
)
def test_an_unknown_method_is_named_in_a_note(declaration, named):
    spec = from_config({**LLAMA, "quantization_config": declaration})
    assert any(named in note for note in spec.notes)
    assert serve(spec, ServingPlan()).weights_bytes == 2 * parameters(spec).total


@pytest.mark.parametrize(
    "declaration",
    [
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq", "bits": 4, "group_size": -2},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "modules_to_not_convert": {"a": 1}},
        {"quant_method": "fp8", "modules_to_not_convert": [1]},
        {"quant_method": "compressed-tensors", "config_groups": []},
        {"quant_method": "modelopt", "quant_algo": "FP9"},
    ],
)
def test_a_declaration_out_of_bounds_is_one_complaint(declaration):
    with pytest.raises(InputError, match="quantization_config"):
        from_config({**LLAMA, "quantization_config": declaration})


def test_a_list_of_a_hundred_thousand_modules_is_read():
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(100) for expert in range(1000)]
    spec = from_config(
        {**LLAMA, "quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", *names]}}
    )
    assert parameters(spec).stored_bytes == WIDE + L * (LINEARS + 7 * 4)
