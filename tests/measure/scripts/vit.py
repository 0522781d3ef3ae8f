"""A ViT image classifier: patches by convolution, nn.TransformerEncoder, fp16 autocast with GradScaler, a DataLoader with workers."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

batch = int(sys.argv[1]) if len(sys.argv) > 1 else 16


class ViT(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
loader = DataLoader(data, batch, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
model = ViT().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler, correct = torch.amp.GradScaler("cuda"), 0
for _ in range(3):
    for images, labels in loader:
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda"):
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        correct += (scores.argmax(1) == labels).sum().item()
