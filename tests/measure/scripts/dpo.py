"""Direct preference optimization: chosen and rejected in one batch, a frozen reference model."""

import copy

import torch
from _decoder import decoder, log_probabilities
from torch.nn import functional as F

policy = decoder().cuda()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
for _ in range(4):
    ids = torch.cat([torch.randint(0, 256, (3, 48)), torch.randint(0, 256, (3, 48))]).to("cuda")
    mask = (torch.arange(47, device="cuda") >= 16).float()
    with torch.no_grad():
        base = (log_probabilities(reference, ids) * mask).sum(-1)
    chosen, rejected = ((log_probabilities(policy, ids) * mask).sum(-1) - base).chunk(2)
    loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy = (chosen > rejected).float().mean().item()
