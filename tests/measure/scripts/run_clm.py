"""A causal language model by transformers' Trainer, in the manner of its run_clm example."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 4
checkpointing = "--checkpointing" in sys.argv


class Blocks(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 64) % 256
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = AutoModelForCausalLM.from_config(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        bf16=True,
        max_steps=20,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        dataloader_num_workers=2,
        dataloader_prefetch_factor=2,
    )
    Trainer(model=model, args=arguments, train_dataset=Blocks()).train()
