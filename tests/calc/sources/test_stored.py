"""Why a checkpoint stores more or less than its class has: each reason with its number, against the totals that Hub pages state."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from calc.catalogue import catalogue, load, load_config
from calc.model.config import from_config
from calc.parameters import parameters
from calc.sources.safetensors import DTYPES, stored_safetensors
from calc.sources.stored import StoredTensor, group_of, layer_of, role_of
from calc.stored import Comparison, compared
from calc.units import ceil_div


def tensor(name: str, *shape: int, dtype: str = "BF16") -> StoredTensor:
    elements = 1
    for size in shape:
        elements *= size
    return StoredTensor(name, dtype, elements, elements * DTYPES[dtype][0] // DTYPES[dtype][1])


def fp8(name: str, output: int, inputs: int) -> Iterator[StoredTensor]:
    """A weight in blocks of 128 x 128, each with its scale."""
    yield tensor(f"{name}.weight", output, inputs, dtype="F8_E4M3")
    yield tensor(f"{name}.weight_scale_inv", ceil_div(output, 128), ceil_div(inputs, 128), dtype="F32")


def comparison(model: str, tensors: Iterator[StoredTensor]) -> Comparison:
    return compared(stored_safetensors(tuple(tensors), model), parameters(load(model)), load_config(model))


def amounts(found: Comparison) -> dict[str, int]:
    """Each reason's first words and its number."""
    split = [reason.split(": ", 1) for reason in found.reasons]
    return {text.split(",")[0].split(":")[0]: int(number.replace(",", "")) for number, text in split}


# --- the checkpoints that Hub pages count, by their published layouts


def gpt2() -> Iterator[StoredTensor]:
    h, context = 768, 1024
    yield from (tensor("wte.weight", 50257, h, dtype="F32"), tensor("wpe.weight", context, h, dtype="F32"))
    for layer in range(12):
        at = f"h.{layer}."
        yield tensor(f"{at}attn.bias", 1, 1, context, context, dtype="F32")
        for name, width, inputs in (
            ("attn.c_attn", 3 * h, h),
            ("attn.c_proj", h, h),
            ("mlp.c_fc", 4 * h, h),
            ("mlp.c_proj", h, 4 * h),
        ):
            yield from (tensor(f"{at}{name}.weight", inputs, width), tensor(f"{at}{name}.bias", width))
        for name in ("ln_1", "ln_2"):
            yield from (tensor(f"{at}{name}.weight", h), tensor(f"{at}{name}.bias", h))
    yield from (tensor("ln_f.weight", h), tensor("ln_f.bias", h))


def minimax_m2() -> Iterator[StoredTensor]:
    h, heads, width, vocabulary = 3072, 48 * 128, 1536, 200_064
    yield from (tensor("model.embed_tokens.weight", vocabulary, h), tensor("lm_head.weight", vocabulary, h))
    yield tensor("model.norm.weight", h)
    for layer in range(62):
        at = f"model.layers.{layer}."
        for name, output, inputs in (("q", heads, h), ("k", 1024, h), ("v", 1024, h), ("o", h, heads)):
            yield from fp8(f"{at}self_attn.{name}_proj", output, inputs)
        yield from (tensor(f"{at}self_attn.q_norm.weight", heads), tensor(f"{at}self_attn.k_norm.weight", 1024))
        yield from (tensor(f"{at}{name}_layernorm.weight", h) for name in ("input", "post_attention"))
        yield tensor(f"{at}block_sparse_moe.gate.weight", 256, h)
        yield tensor(f"{at}block_sparse_moe.e_score_correction_bias", 256)
        for expert in range(256):
            for name, output, inputs in (("w1", width, h), ("w2", h, width), ("w3", width, h)):
                yield from fp8(f"{at}block_sparse_moe.experts.{expert}.{name}", output, inputs)


def deepseek_v3() -> Iterator[StoredTensor]:
    h, vocabulary = 7168, 129_280
    yield from (tensor("model.embed_tokens.weight", vocabulary, h), tensor("lm_head.weight", vocabulary, h))
    yield tensor("model.norm.weight", h)
    attention = (
        ("q_a_proj", 1536, h),
        ("q_b_proj", 24_576, 1536),
        ("kv_a_proj_with_mqa", 576, h),
        ("kv_b_proj", 32_768, 512),
        ("o_proj", h, 16_384),
    )
    for layer in range(62):
        at = f"model.layers.{layer}."
        for name, output, inputs in attention:
            yield from fp8(f"{at}self_attn.{name}", output, inputs)
        yield from (
            tensor(f"{at}self_attn.q_a_layernorm.weight", 1536),
            tensor(f"{at}self_attn.kv_a_layernorm.weight", 512),
        )
        yield from (tensor(f"{at}{name}_layernorm.weight", h) for name in ("input", "post_attention"))
        experts = [("mlp", 18_432)] if layer < 3 else [("mlp.shared_experts", 2048)]
        if layer >= 3:
            experts += [(f"mlp.experts.{expert}", 2048) for expert in range(256)]
            yield from (tensor(f"{at}mlp.gate.weight", 256, h), tensor(f"{at}mlp.gate.e_score_correction_bias", 256))
        for name, width in experts:
            for part, output, inputs in (("gate_proj", width, h), ("up_proj", width, h), ("down_proj", h, width)):
                yield from fp8(f"{at}{name}.{part}", output, inputs)
    at = "model.layers.61."  # multi-token prediction
    yield from (tensor(f"{at}{name}.weight", h) for name in ("enorm", "hnorm", "shared_head.norm"))
    yield tensor(f"{at}eh_proj.weight", h, 2 * h)
    yield from (
        tensor(f"{at}embed_tokens.weight", vocabulary, h),
        tensor(f"{at}shared_head.head.weight", vocabulary, h),
    )


def gpt_oss_120b() -> Iterator[StoredTensor]:
    h, experts = 2880, 128
    yield from (tensor("model.embed_tokens.weight", 201_088, h), tensor("lm_head.weight", 201_088, h))
    yield tensor("model.norm.weight", h)
    for layer in range(36):
        at = f"model.layers.{layer}."
        for name, output, inputs in (("q", 4096, h), ("k", 512, h), ("v", 512, h), ("o", h, 4096)):
            yield tensor(f"{at}self_attn.{name}_proj.weight", output, inputs)
            yield tensor(f"{at}self_attn.{name}_proj.bias", output)
        yield tensor(f"{at}self_attn.sinks", 64)
        yield from (tensor(f"{at}{name}_layernorm.weight", h) for name in ("input", "post_attention"))
        yield from (tensor(f"{at}mlp.router.weight", experts, h), tensor(f"{at}mlp.router.bias", experts))
        for name, output in (("gate_up_proj", 2 * h), ("down_proj", h)):
            yield tensor(f"{at}mlp.experts.{name}_blocks", experts, output, h // 32, 16, dtype="U8")
            yield tensor(f"{at}mlp.experts.{name}_scales", experts, output, h // 32, dtype="U8")
            yield tensor(f"{at}mlp.experts.{name}_bias", experts, output)


@pytest.mark.parametrize(
    ("model", "tensors", "shares"),
    [
        ("gpt2", gpt2, {"buffers": 12 * 1024**2}),
        ("minimax-m2.5", minimax_m2, {"buffers": 62 * 256, "scales and tables of a quantised format": 13_880_064}),
        ("deepseek-v3", deepseek_v3, None),
    ],
)
def test_stored_elements_are_what_the_hub_page_states_and_every_one_is_explained(model, tensors, shares):
    found = comparison(model, tensors())
    assert found.stored.elements == catalogue()[model].hub_total
    assert found.difference == catalogue()[model].hub_total - parameters(load(model)).total
    assert sum(amounts(found).values()) == found.difference
    assert not any("not explained" in reason for reason in found.reasons)
    if shares:
        assert amounts(found) == shares


def test_deepseek_v3_stores_a_layer_of_multi_token_prediction():
    shares = amounts(comparison("deepseek-v3", deepseek_v3()))
    assert 11.5e9 < shares["layers beyond the class's 61"] < 13.5e9


def test_packed_experts_are_unpacked_and_their_scales_are_the_whole_difference_of_the_hub_page():
    found = comparison("gpt-oss-120b", gpt_oss_120b())
    shares = amounts(found)
    experts = 36 * 128 * 3 * 2880**2
    assert shares == {"containers": -experts // 2, "scales and tables of a quantised format": experts // 32}
    assert found.difference == sum(shares.values())
    # the Hub unpacks the blocks, and counts each scale as one
    assert found.stored.elements + experts // 2 == catalogue()["gpt-oss-120b"].hub_total


# --- each reason by itself

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}


def llama(linear=tensor, head: bool = True) -> list[StoredTensor]:
    at = "model.layers.0."
    rows = [tensor("model.embed_tokens.weight", 100, 64), tensor("model.norm.weight", 64)]
    rows += [tensor("lm_head.weight", 100, 64)] if head else []
    rows += [tensor(f"{at}{name}_layernorm.weight", 64) for name in ("input", "post_attention")]
    rows += [linear(f"{at}self_attn.{name}_proj.weight", 64, 64) for name in "qkvo"]
    return [*rows, *(linear(f"{at}mlp.{name}_proj.weight", 128, 64) for name in ("gate", "up", "down"))]


def explained(tensors: list[StoredTensor], **options: object) -> Comparison:
    config = {**LLAMA, **options}
    return compared(stored_safetensors(tuple(tensors), "a"), parameters(from_config(config)), config)


def test_a_plain_checkpoint_needs_no_reason():
    found = explained(llama())
    assert (found.difference, found.reasons) == (0, ())


def test_a_tied_head_that_is_stored_is_told():
    assert amounts(explained(llama(), tie_word_embeddings=True)) == {"the head": 6400}


def test_a_head_that_is_not_stored_is_told():
    assert amounts(explained(llama(head=False))) == {
        "the class has a head of its own and the checkpoint stores none": -6400
    }


def test_rotary_tables_are_buffers():
    assert amounts(explained([*llama(), tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 8)])) == {"buffers": 8}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_containers_hold_as_many_weights_as_the_config_says(bits):
    def linear(name: str, output: int, inputs: int) -> StoredTensor:
        return tensor(name.replace("weight", "qweight"), output, inputs * bits // 32, dtype="I32")

    found = explained(llama(linear), quantization_config={"quant_method": "gptq", "bits": bits})
    linear_weights = 4 * 64 * 64 + 3 * 64 * 128
    assert amounts(found) == {"containers": linear_weights * bits // 32 - linear_weights}


def test_bitsandbytes_holds_two_weights_a_byte():
    found = explained(llama(lambda name, output, inputs: tensor(name, output * inputs // 2, 1, dtype="U8")))
    assert amounts(found) == {"containers": -(4 * 64 * 64 + 3 * 64 * 128) // 2}


def test_what_no_reason_explains_is_said():
    found = explained([*llama(), tensor("model.layers.0.self_attn.extra.weight", 7)])
    assert found.reasons == (
        "+7: not explained; the file may be one shard, an adapter, or another version of the class",
    )


@pytest.mark.parametrize(
    "config", [{"bits": 3}, {"bits": None}, {"bits": "4"}, {"bits": 0}, {"bits": [4]}, [], "gptq", 4]
)
def test_any_quantization_config_is_survived(config):
    assert explained(llama(), quantization_config=config).difference == 0


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("token_embd.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("output.weight", "head"),
        ("output_norm.weight", "norms"),
        ("model.layers.3.post_attention_layernorm.weight", "norms"),
        ("blk.0.attn_norm.weight", "norms"),
        ("h.0.ln_1.bias", "norms"),
        ("blk.0.attn_output.weight", "attention"),
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("transformer.h.0.self_attention.query_key_value.weight", "attention"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "experts"),
        ("model.layers.0.block_sparse_moe.gate.weight", "experts"),
        ("blk.0.ffn_gate_exps.weight", "experts"),
        ("blk.0.ffn_gate_inp.weight", "experts"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("blk.0.ffn_down.weight", "mlp"),
        ("model.visual.blocks.0.attn.qkv.weight", "towers"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "towers"),
        ("backbone.layers.0.mixer.A_log", "other"),
    ],
)
def test_a_tensor_is_grouped_by_its_name(name, group):
    assert group_of(name) == group


def test_layers_are_read_from_both_kinds_of_names():
    assert [layer_of(name) for name in ("model.layers.61.eh_proj.weight", "blk.7.attn_q.weight", "lm_head.weight")] == [
        61,
        7,
        None,
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "role"),
    [
        ("a.weight", "BF16", "weight"),
        ("a.weight", "I8", "weight"),
        ("a.bias", "F32", "weight"),
        ("a.weight_scale", "F32", "scale"),
        ("a.weight_scale_inv", "F32", "scale"),
        ("a.scales", "F16", "scale"),
        ("a.qzeros", "I32", "scale"),
        ("a.g_idx", "I32", "scale"),
        ("a.weight.absmax", "U8", "scale"),
        ("a.weight.quant_state.bitsandbytes__nf4", "U8", "scale"),
        ("a.scale", "F8_E8M0", "scale"),
        ("a.logit_scale", "F32", "weight"),
        ("a.qweight", "I32", "packed"),
        ("a.weight_packed", "I32", "packed"),
        ("a.weight", "F4", "weight"),
        ("position_ids", "I64", "buffer"),
    ],
)
def test_a_tensor_has_a_role_by_its_name_and_format(name, dtype, role):
    assert role_of(StoredTensor(name, dtype, 2, 2)) == role


def test_the_json_of_a_comparison_can_be_written():
    data = json.loads(json.dumps(explained(llama()).as_json()))
    assert {"elements", "bytes", "by_dtype", "by_group", "difference", "reasons"} <= set(data)
