"""The families: from `architectures[0]` to the function that reads such a config.

A new family is a function of a few lines over `common`, and one row in its module's table.
"""

from __future__ import annotations

from calc.model.families import (
    bart_whisper_opt,
    bert_roberta,
    bitnet_diffllama_nemotron,
    clip_siglip_vit,
    deepseek_mla,
    deepseek_v4,
    distilbert_albert_deberta,
    gemma3n,
    gemma4,
    gpt2_falcon_bloom,
    hunyuan,
    lfm2_rwkv_kimi_linear,
    llama4,
    llama_qwen_gemma_phi,
    llama_variants,
    mamba_hybrids,
    mimo_v2,
    minimax_m3,
    mixtral_qwen3_moe_gpt_oss,
    mllama,
    modernbert_nomic_gte,
    nemotron_nas,
    olmo_hybrid_bailing_lfm3,
    qwen1_baichuan_chatglm,
    qwen2_moe_glm_moe,
    rembert_xlm_xlnet,
    t5_umt5_longt5,
    vision_language,
    zamba_falcon_h1,
    zaya_jetmoe,
)
from calc.model.families.base import Family

_MODULES = (
    llama_qwen_gemma_phi,
    llama_variants,
    gpt2_falcon_bloom,
    mixtral_qwen3_moe_gpt_oss,
    qwen2_moe_glm_moe,
    deepseek_mla,
    deepseek_v4,
    mamba_hybrids,
    lfm2_rwkv_kimi_linear,
    mimo_v2,
    minimax_m3,
    nemotron_nas,
    qwen1_baichuan_chatglm,
    gemma4,
    gemma3n,
    vision_language,
    llama4,
    mllama,
    clip_siglip_vit,
    bert_roberta,
    distilbert_albert_deberta,
    modernbert_nomic_gte,
    bart_whisper_opt,
    t5_umt5_longt5,
    hunyuan,
    olmo_hybrid_bailing_lfm3,
    rembert_xlm_xlnet,
    zamba_falcon_h1,
    zaya_jetmoe,
    bitnet_diffllama_nemotron,
)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}
