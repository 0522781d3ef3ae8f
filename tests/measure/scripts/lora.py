"""peft's LoRA on a model in bf16, from a folder that holds its config, with gradient checkpointing."""

import json
import pathlib
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

config = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
model.train()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
for step in range(6):
    ids = torch.randint(0, 512, (4, 64), device=model.device)
    loss = model(input_ids=ids, labels=ids).loss
    (loss / 2).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()
