"""A diffusion U-Net by hand: noise added by a schedule, the noise predicted, exponential moving average of the weights."""

import copy
import sys

import torch
from torch import nn

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 8
device = torch.device("cuda:0")


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(32, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x, t):
        y = self.conv(nn.functional.silu(self.norm(x)))
        return self.skip(x) + y + self.time(t)[:, :, None, None]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.enter = nn.Embedding(100, 32), nn.Conv2d(3, 16, 3, padding=1)
        self.down, self.low, self.up = Residual(16, 32), Residual(32, 32), Residual(48, 16)
        self.leave = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        t = self.time(t)
        x = self.enter(x)
        low = self.low(nn.functional.avg_pool2d(self.down(x, t), 2), t)
        low = nn.functional.interpolate(low, scale_factor=2, mode="nearest")
        return self.leave(self.up(torch.cat([x, low], 1), t))


model = UNet().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, device=device), 0)
for _ in range(5):
    images = torch.rand(batch, 3, 32, 32).to(device)
    t = torch.randint(0, 100, (batch,), device=device)
    noise = torch.randn_like(images)
    share = alphas[t].view(-1, 1, 1, 1)
    loss = nn.functional.mse_loss(model(share.sqrt() * images + (1 - share).sqrt() * noise, t), noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.01)
