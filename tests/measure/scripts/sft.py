"""Supervised fine-tuning in the manner of TRL's sft example: the loss on completions alone, padding in a collator."""

import torch
from _decoder import decoder
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

rows = [{"prompt": list(range(10)), "completion": list(range(10, 40 + index % 7))} for index in range(64)]


def collate(batch):
    longest = max(len(row["prompt"] + row["completion"]) for row in batch)
    ids, labels = torch.zeros(len(batch), longest, dtype=torch.long), torch.full((len(batch), longest), -100)
    for index, row in enumerate(batch):
        whole = torch.tensor(row["prompt"] + row["completion"])
        ids[index, : len(whole)] = whole
        labels[index, len(row["prompt"]) : len(whole)] = whole[len(row["prompt"]) :]
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


model = decoder().to("cuda")
model.config.use_cache = False
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)
for batch in DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate):
    batch = {name: value.to("cuda") for name, value in batch.items()}
    model(**batch).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
