"""torchtune's layer and head in plain PyTorch (0.6.1: attention.py, position_embeddings.py, rms_norm.py, transformer.py,
loss/ce_chunked_output_loss.py), and what its head with its loss allocates with fake tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from measure.trace.cuda import cuda_choices
from measure.trace.recorder import Recorder


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size, self.scale = (size,), nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x.float(), self.size, self.scale, 1e-5).to(x.dtype)


def _turned(x, cache):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
    first = pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1]
    second = pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self, hidden, inner, heads, kv_heads, head):
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.query = nn.Linear(hidden, heads * head, bias=False)
        self.key, self.value = (nn.Linear(hidden, kv_heads * head, bias=False) for _ in range(2))
        self.output = nn.Linear(heads * head, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.first, self.second = Norm(hidden), Norm(hidden)

    def attention(self, x, cache):
        b, s, _ = x.shape
        query = _turned(self.query(x).view(b, s, self.heads, self.head), cache).transpose(1, 2)
        key = _turned(self.key(x).view(b, s, self.kv_heads, self.head), cache).transpose(1, 2)
        value = self.value(x).view(b, s, self.kv_heads, self.head).transpose(1, 2)
        if self.heads != self.kv_heads:
            shape = (b, self.kv_heads, self.heads // self.kv_heads, -1, self.head)
            key, value = (each.unsqueeze(2).expand(shape).flatten(1, 2) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x, cache):
        h = self.attention(self.first(x), cache) + x
        normal = self.second(h)
        return h + self.down(F.silu(self.gate(normal)) * self.up(normal))


def head_and_loss(hidden: int, vocabulary: int, tokens: int, chunks: int) -> tuple[int, int]:
    """The highest points of forward and backward of chunked_output and CEWithChunkedOutputLoss, over what was there before."""
    recorder = Recorder({}, 512, False)
    with cuda_choices(), FakeTensorMode(allow_non_fake_inputs=True), recorder:
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(1, tokens, dtype=torch.int64)
        recorder.begin("forward")
        before, start = _live(recorder), len(recorder.events)
        hidden_states = x * 1.0
        logits = [head(chunk) for chunk in hidden_states.chunk(chunks, dim=1)]
        del hidden_states
        logits = [chunk.reshape(-1, vocabulary) for chunk in logits]
        loss: torch.Tensor | float = 0.0
        for chunk, label in zip(logits, labels.chunk(chunks, dim=1), strict=True):
            loss += F.cross_entropy(chunk.float(), label.reshape(-1), reduction="sum")
        del logits, chunk
        recorder.begin("backward")
        loss.backward()
        now, highest = before, {"forward": 0, "backward": 0}
        for event in recorder.events[start:]:
            now += event.sign * event.storage.nbytes
            highest[event.site.phase] = max(highest[event.site.phase], now - before)
    return highest["forward"], highest["backward"]


def _live(recorder: Recorder) -> int:
    return sum(storage.nbytes for storage in recorder.live())
