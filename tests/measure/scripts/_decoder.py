"""A small decoder of transformers that the preference programs train."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig


def decoder():
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def log_probabilities(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    chosen = torch.gather(logits, 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return chosen - torch.logsumexp(logits, -1)
