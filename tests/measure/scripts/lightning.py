"""A module and a trainer in Lightning's pattern: hooks, an optimizer closure, metrics as numbers."""

import torch
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 784))

    def training_step(self, batch):
        x = batch.view(batch.size(0), -1)
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)


class Trainer:
    def __init__(self, device):
        self.device, self.logged = torch.device(device, 0), []

    def fit(self, module, batches):
        module.to(self.device).train()
        optimizer, schedule = module.configure_optimizers()
        for batch in batches:
            batch = batch.to(self.device)

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = module.training_step(batch)
                loss.backward()
                return loss

            self.logged.append(optimizer.step(closure).item())
            schedule.step()


Trainer("cuda").fit(Module(), (torch.randn(32, 1, 28, 28) for _ in range(5)))
