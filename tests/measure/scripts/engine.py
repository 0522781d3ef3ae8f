"""A training engine in DeepSpeed's manner: 16-bit weights, fp32 masters that the optimizer steps, gradients copied into one flat buffer."""

import torch
from torch import nn


class Engine:
    def __init__(self, model):
        self.module = model.half().cuda()
        self.halves = [each for each in self.module.parameters() if each.requires_grad]
        self.flat = torch.cat([each.detach().float().flatten() for each in self.halves]).requires_grad_()
        self.optimizer, self.scale = torch.optim.AdamW([self.flat], lr=1e-4), 2.0**16

    def backward(self, loss):
        (loss.float() * self.scale).backward()

    def step(self):
        gradient = torch.cat([each.grad.flatten() for each in self.halves]).float().div_(self.scale)
        if gradient.isinf().any():
            self.scale /= 2
            return
        self.flat.grad = gradient
        for each in self.halves:
            each.grad = None
        self.optimizer.step()
        self.flat.grad = None
        at = 0
        for each in self.halves:
            each.data.copy_(self.flat[at : at + each.numel()].view_as(each))
            at += each.numel()


layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())]
engine = Engine(nn.Sequential(nn.Embedding(100, 256), *layers, nn.Linear(256, 100)))
for _ in range(4):
    ids = torch.randint(0, 100, (8, 32)).cuda()
    loss = nn.functional.cross_entropy(engine.module(ids).flatten(0, 1), ids.flatten())
    engine.backward(loss)
    engine.step()
