"""FLOPs against PyTorch's own count of the real transformers programs, to the last one."""

from __future__ import annotations

import warnings

import pytest

from calc.catalogue import load, load_config
from calc.compute import ComputePlan, compute
from calc.flops import adapter_flops, pass_flops
from calc.model.config import from_config

pytestmark = pytest.mark.torch

SEQ = 32
_BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = _BASE | {"head_dim": 32}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
# class, config class, fields
PROGRAMS = {
    "LlamaForCausalLM": ("LlamaConfig", _BASE),
    "MistralForCausalLM": ("MistralConfig", _WIDE | {"sliding_window": 64}),
    "Qwen2ForCausalLM": ("Qwen2Config", _BASE | {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", _WIDE),
    "GemmaForCausalLM": ("GemmaConfig", _WIDE),
    "Gemma2ForCausalLM": ("Gemma2Config", _WIDE | {"sliding_window": 64}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", _WIDE | {"sliding_window": 64}),
    "Phi3ForCausalLM": ("Phi3Config", _BASE),
    "Olmo2ForCausalLM": ("Olmo2Config", _BASE),
    "BitNetForCausalLM": ("BitNetConfig", _BASE),
    "DiffLlamaForCausalLM": ("DiffLlamaConfig", _BASE),
    "NemotronForCausalLM": ("NemotronConfig", _WIDE),
    "HunYuanDenseV1ForCausalLM": ("HunYuanDenseV1Config", _WIDE),
    "HunYuanMoEV1ForCausalLM": ("HunYuanMoEV1Config", _WIDE | {"num_experts": 4, "moe_topk": 2}),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "MixtralForCausalLM": ("MixtralConfig", _BASE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", _WIDE | _EXPERTS | {"num_experts": 8}),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        _BASE
        | _MLA
        | _EXPERTS
        | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 2}
        | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "DbrxForCausalLM": (
        "DbrxConfig",
        {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 128, "max_seq_len": 256}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
        | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "ModernBertDecoderForCausalLM": (
        "ModernBertDecoderConfig",
        {key: _BASE[key] for key in _BASE if key != "num_key_value_heads"} | {"cls_token_id": 1, "sep_token_id": 2},
    ),
    "JetMoeForCausalLM": (
        "JetMoeConfig",
        {key: _BASE[key] for key in _BASE if key != "num_attention_heads"}
        | {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Dots1ForCausalLM": (
        "Dots1Config",
        _WIDE | _EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1},
    ),
    "LongcatFlashForCausalLM": (
        "LongcatFlashConfig",
        {key: _BASE[key] for key in _BASE if key not in ("num_hidden_layers", "num_key_value_heads")}
        | _MLA
        | {"num_layers": 2, "n_routed_experts": 8, "zero_expert_num": 0, "moe_topk": 3, "head_dim": 8}
        | {"expert_ffn_hidden_size": 32},
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        _WIDE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "DeepseekV4ForCausalLM": (
        "DeepseekV4Config",
        {key: _WIDE[key] for key in _WIDE if key not in ("intermediate_size", "num_key_value_heads")}
        | {"q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 8, "n_routed_experts": 4, "sliding_window": 1024}
        | {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16}
        | {"index_topk": 1024, "max_position_embeddings": 1024},
    ),
}


def program(name: str, device: str = "cpu"):
    """The real program and the spec of the same config. Experts run one by one, so that each is counted as it is used."""
    import torch
    import transformers

    config_class, fields = PROGRAMS[name]
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device(device):
        model = getattr(transformers, name)(config).train()
    return model, from_config(config.to_dict() | {"architectures": [name]})


def flops_run(model, seq: int) -> tuple[int, int]:
    """(forward, forward and backward) FLOPs that PyTorch counts, without the rotary tables, which are an outer product of
    positions and frequencies written as a matmul."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    ids = torch.ones(1, seq, dtype=torch.int64, device=device)
    # making the mask reads positions, which the meta device does not have: there it is given
    mask = {"attention_mask": torch.zeros(1, 1, seq, seq, device=device)} if device.type == "meta" else {}
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False, **mask).logits
        found = counter.get_flop_counts()
        forward = sum(found["Global"].values())
        rotary = sum(sum(part.values()) for name, part in found.items() if name.endswith("rotary_emb"))
        logits.backward(torch.ones_like(logits))
    return forward - rotary, counter.get_total_flops() - rotary


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "DeepseekV4ForCausalLM"])
def test_the_program_computes_what_the_full_convention_counts(name):
    model, spec = program(name)
    answer = compute(spec, ComputePlan(seq=SEQ)).full
    assert flops_run(model, SEQ) == (SEQ * answer.forward_flops_per_token, answer.training_flops)


def test_deepseek_v4_is_counted_but_for_the_mixing_of_its_streams():
    """Left out: each half of a layer multiplies its n streams by an n x n matrix, 2 n^2 h FLOPs a token."""
    model, spec = program("DeepseekV4ForCausalLM")
    seq, streams, h, layers = 256, 4, 64, 2
    answer = compute(spec, ComputePlan(seq=seq)).full
    left_out = seq * layers * 2 * 2 * streams**2 * h
    assert flops_run(model, seq)[0] == seq * answer.forward_flops_per_token + left_out


def test_llama_2_7b_whole_on_the_meta_device():
    import torch
    import transformers

    config = transformers.LlamaConfig(**load_config("llama-2-7b"))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    answer = compute(load("llama-2-7b"), ComputePlan(seq=4096)).full
    assert flops_run(model, 4096) == (4096 * answer.forward_flops_per_token, answer.training_flops)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("v_proj",), ("gate_proj", "down_proj"), ("all-linear",)])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"])
def test_adapters_on_frozen_weights_cost_what_the_program_computes(name, targets):
    import peft

    if name == "Phi3ForCausalLM":  # query, key and value are one module, and gate and up another
        targets = {"q_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
        targets = tuple(dict.fromkeys(targets.get(each, each) for each in ("q_proj", "down_proj")))
    model, spec = program(name)
    wanted = "all-linear" if targets == ("all-linear",) else list(targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renamed
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=wanted, task_type="CAUSAL_LM"))
    found = adapter_flops(
        spec, SEQ, 4, lambda module: wanted == "all-linear" or module in targets, causal=False, fused_attention=False
    )
    assert flops_run(adapted, SEQ) == (SEQ * found.forward, SEQ * found.model)


def test_adapters_on_llama_2_7b_cost_about_two_thirds_of_full_training():
    spec = load("llama-2-7b")
    full = pass_flops(spec, 4096)
    some = adapter_flops(spec, 4096, 8, lambda module: module in ("q_proj", "v_proj"))
    assert full.backward == 2 * full.forward
    assert (
        0.66 < some.model / full.model < 0.69
    )  # attention's backward stays whole; without it two of three passes are left
    assert pass_flops(spec, 4096, "full").hardware / full.model == pytest.approx(4 / 3, abs=0.01)


def test_full_recomputation_repeats_the_layers_and_not_the_head():
    from torch.utils.checkpoint import set_checkpoint_early_stop

    model, spec = program("LlamaForCausalLM")
    model.activation_checkpointing_enable()
    with set_checkpoint_early_stop(
        False
    ):  # by default the last matmul of a layer, whose output nobody needs, is spared
        _, total = flops_run(model, SEQ)
    assert total == compute(spec, ComputePlan(seq=SEQ, recompute="full")).full.hardware_flops


_SEES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
_SEES |= {"image_size": 28, "patch_size": 14}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_QWEN = {"hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "depth": 1, "num_heads": 4}
# class: (fields of its text, its encoder's, the rest)
SEEING = {
    "Qwen2_5_VLForConditionalGeneration": (_BASE | _ROPE, _QWEN, {}),
    "Glm4vForConditionalGeneration": (_BASE | _ROPE, _QWEN | {"image_size": 28}, {}),
    "LlavaNextForConditionalGeneration": (
        _WIDE | {"model_type": "mistral", "sliding_window": None},
        _SEES | {"model_type": "clip_vision_model", "projection_dim": 32},
        {},
    ),
    "PaliGemmaForConditionalGeneration": (
        _WIDE | {"model_type": "gemma"},
        _SEES | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"projection_dim": 64},
    ),
    "SmolVLMForConditionalGeneration": (_BASE | {"model_type": "llama"}, _SEES, {}),
    "MllamaForConditionalGeneration": (
        _BASE | {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
        _SEES | {"num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 64},
        {},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEING)
def test_a_model_that_sees_computes_on_a_text_what_its_language_model_is_counted_for(name):
    import transformers

    text, vision, more = SEEING[name]
    model_class = getattr(transformers, name)
    config = model_class.config_class(text_config=text, vision_config=vision, **more)
    config._attn_implementation = "eager"
    model = model_class(config).train()
    answer = compute(from_config(config.to_dict() | {"architectures": [name]}), ComputePlan(seq=SEQ)).full
    assert flops_run(model, SEQ) == (SEQ * answer.forward_flops_per_token, answer.training_flops)


def test_gemma_3n_is_counted_but_for_the_mixing_of_its_streams():
    """Left out: AltUp's n x n products of the streams, and its router's second pass, in each layer."""
    import transformers

    n, layers, h = 3, 2, 64
    fields = _WIDE | {
        "altup_num_inputs": n,
        "laurel_rank": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 4,
    }
    fields |= {"vocab_size_per_layer_input": 96, "activation_sparsity_pattern": [0.0] * layers}
    config = transformers.Gemma3nTextConfig(**fields)
    config._attn_implementation = "eager"
    model = transformers.Gemma3nForCausalLM(config).train()
    spec = from_config(config.to_dict() | {"architectures": ["Gemma3nForCausalLM"]})
    answer = compute(spec, ComputePlan(seq=SEQ)).full
    left_out = SEQ * layers * (2 * n * n * h + 2 * n * h)
    assert flops_run(model, SEQ)[0] == SEQ * answer.forward_flops_per_token + left_out
