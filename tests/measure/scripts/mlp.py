import torch
import torch.nn.functional as F
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randn(512, 256)
for i in range(10):
    idx = torch.randint(len(data), (64,))
    x = data[idx].to(device, non_blocking=True)
    loss = F.mse_loss(model(x), x)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    print(i, f"{loss:.3f}", loss.item(), x.device, torch.cuda.max_memory_allocated())
