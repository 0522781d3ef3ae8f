"""The families: from `architectures[0]` to the function that reads such a config.

A new family is a function of a few lines over `common`, and one row in its module's table.
"""

from __future__ import annotations

from calc.model.families import (
    bert_kin,
    decoders,
    deepseek4,
    dense,
    encoders,
    gemma3n,
    gemma4,
    gpt,
    hunyuan,
    hybrid,
    latent,
    linear,
    llama4,
    mimo,
    minimax,
    mixed,
    mixtures,
    mllama,
    multimodal,
    pruned,
    remote,
    routed,
    seq2seq,
    shared,
    sparse,
    variants,
    vision,
)
from calc.model.families.base import Family

_MODULES = (
    *(decoders, dense, gpt, mixtures, sparse, latent, deepseek4, hybrid, linear),
    *(mimo, minimax, pruned, remote, gemma4, gemma3n, multimodal, llama4, mllama, vision, encoders, seq2seq),
    *(hunyuan, mixed, bert_kin, shared, routed, variants),
)
FAMILIES: dict[str, Family] = {name: family for module in _MODULES for name, family in module.FAMILIES.items()}
