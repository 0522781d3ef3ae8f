"""A small GPT with a training loop in nanoGPT's manner: tied embeddings, autocast, GradScaler, gradient accumulation, clipping."""

import argparse
import contextlib
import math

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

flags = argparse.ArgumentParser()
flags.add_argument("--batch", type=int, default=8)
batch_size = flags.parse_args().batch
block_size, vocab, width, heads, depth = 64, 512, 64, 4, 3
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
context = contextlib.nullcontext() if device == "cpu" else torch.amp.autocast(device, dtype=getattr(torch, dtype))
data = np.arange(5000, dtype=np.uint16) % vocab


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, C = x.size()
        split = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (each.view(B, T, heads, C // heads).transpose(1, 2) for each in split)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(block_size, width)
        self.h = nn.ModuleList([Block() for _ in range(depth)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * depth))

    def forward(self, idx, targets):
        positions = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


model = GPT().to(device)
scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
decay = [each for each in model.parameters() if each.dim() >= 2]
rest = [each for each in model.parameters() if each.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device == "cuda")
x, y = get_batch()
for _ in range(20):
    for _ in range(2):
        with context:
            loss = model(x, y) / 2
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    assert math.isfinite(loss.item() * 2)
