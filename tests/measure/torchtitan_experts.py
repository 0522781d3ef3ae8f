"""Experts and latent attention as torchtitan 0.2.2 runs them, in plain PyTorch: parts of the decoder that is the formula's witness."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from tests.measure.torchtitan_program import FeedForward, Norm


def _turned(x, table):
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.view(1, x.shape[1], 1, -1)).flatten(3).to(x.dtype)


class LatentAttention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        latent = shape.latent
        self.shape, self.heads = latent, shape.heads
        width = shape.heads * (latent.nope + latent.rope)
        if latent.query_rank:
            self.query_down = nn.Linear(shape.hidden, latent.query_rank, bias=False)
            self.query_norm = Norm(latent.query_rank)
            self.query_up = nn.Linear(latent.query_rank, width, bias=False)
        else:
            self.query = nn.Linear(shape.hidden, width, bias=False)
        self.key_value_down = nn.Linear(shape.hidden, latent.rank + latent.rope, bias=False)
        self.key_value_norm = Norm(latent.rank)
        self.key_value_up = nn.Linear(latent.rank, shape.heads * (latent.nope + latent.value), bias=False)
        self.output = nn.Linear(shape.heads * latent.value, shape.hidden, bias=False)

    def forward(self, x, table):
        batch, tokens, _ = x.shape
        shape = self.shape
        if shape.query_rank:
            query = self.query_down(x)
            query = self.query_up(self.query_norm(query))
        else:
            query = self.query(x)
        query = query.view(batch, tokens, -1, shape.nope + shape.rope)
        passed, turned = torch.split(query, [shape.nope, shape.rope], dim=-1)
        turned = _turned(turned, table)
        query = torch.cat([passed, turned], dim=-1)
        latents = self.key_value_down(x)
        latents, key_turned = torch.split(latents, [shape.rank, shape.rope], dim=-1)
        key_turned = _turned(key_turned.unsqueeze(2), table)
        latents = self.key_value_up(self.key_value_norm(latents))
        latents = latents.view(batch, tokens, -1, shape.nope + shape.value)
        key_passed, value = torch.split(latents, [shape.nope, shape.value], dim=-1)
        key = torch.cat([key_passed, key_turned.expand(-1, -1, self.heads, -1)], dim=-1)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, tokens, -1))


class Experts(nn.Module):
    """Router, grouped experts, shared expert. Padding adds no rows here: on a device it is up to eight for each expert."""

    def __init__(self, shape):
        super().__init__()
        experts = shape.experts
        self.count, self.chosen, self.normalised = experts.count, experts.chosen, experts.normalised
        self.added = experts.added
        self.router = nn.Linear(shape.hidden, experts.count, bias=False)
        self.grouped = Grouped(shape, experts)
        self.shared = FeedForward(shape, experts.shared) if experts.shared else None
        self.register_buffer("bias", torch.empty(experts.count))
        self.register_buffer("served", torch.empty(experts.count))

    def forward(self, x):
        batch, tokens, hidden = x.shape
        x = x.view(-1, hidden)
        weights, chosen = self._route(x)
        order = torch.argsort(chosen.view(-1), stable=True)
        sorted_weights = weights.view(-1)[order]
        index = order // self.chosen
        if self.added:
            index = index.reshape(-1, 1).expand(-1, hidden)
            return self._added(x, index, sorted_weights).reshape(batch, tokens, hidden)
        routed = x[index]
        del index
        routed_output = self.grouped(routed)
        out = self.shared(x) if self.shared is not None else None
        unsorted = torch.zeros((len(x) * self.chosen, hidden), dtype=routed_output.dtype)
        unsorted[order] = routed_output
        unsorted = unsorted.reshape(-1, self.chosen, hidden)
        mixed = torch.bmm(weights.reshape(-1, 1, self.chosen), unsorted.float()).to(x.dtype).squeeze(1)
        del sorted_weights
        return (mixed if out is None else out + mixed).reshape(batch, tokens, hidden)

    def _added(self, x, index, weights):
        routed = torch.gather(x, 0, index)
        outputs = self.grouped(routed)
        outputs = (outputs.to(torch.float32) * weights.reshape(-1, 1)).to(x.dtype)
        out = self.shared(x) if self.shared is not None else torch.zeros_like(x)
        return out.scatter_add(dim=0, index=index, src=outputs)

    def _route(self, x):
        scores = self.router(x)
        scores = torch.sigmoid(scores.to(torch.float32))
        for_choice = scores + self.bias
        _, chosen = torch.topk(for_choice, k=self.chosen, dim=-1, sorted=False)
        weights = scores.gather(dim=1, index=chosen)
        if self.normalised:
            total = weights.sum(dim=-1, keepdim=True) + 1e-20
            weights = weights / total
        return weights * 1.0, chosen


class Grouped(nn.Module):
    """The experts of this rank: with expert parallelism between two exchanges, of as many tokens each way."""

    def __init__(self, shape, experts):
        super().__init__()
        self.count, self.ranks, self.group = experts.count // experts.ep, experts.ep, None
        self.gate = nn.Parameter(torch.empty(self.count, experts.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(self.count, shape.hidden, experts.width))
        self.up = nn.Parameter(torch.empty(self.count, experts.width, shape.hidden))

    def _exchanged(self, x):
        parts = [len(x) // self.ranks] * self.ranks
        return all_to_all_single_autograd(x, parts, parts, self.group) if self.ranks > 1 else x

    def forward(self, x):
        return self._exchanged(self._run(self._exchanged(x)))

    def _run(self, x):
        places = torch.empty(len(x), dtype=torch.int32)
        x = torch.vstack((x, x.new_zeros(x.shape[-1])))
        shape = x.shape
        x = x[places, :]
        ends = torch.empty(self.count, dtype=torch.int32)
        inner = F.silu(torch._grouped_mm(x, self.gate.transpose(-2, -1), offs=ends))
        inner = inner * torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)
        out = torch._grouped_mm(inner, self.down.transpose(-2, -1), offs=ends)
        unpadded = out.new_empty(shape)
        unpadded[places, :] = out
        out = unpadded
        return out[:-1]
