"""Group relative policy optimization: a rollout token by token, rewards by a function, advantages by group, a clipped update."""

import torch
from _decoder import decoder, log_probabilities

policy = decoder().cuda()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
group = 4
for _ in range(3):
    ids = torch.randint(0, 256, (2, 16), device="cuda").repeat_interleave(group, 0)
    policy.eval()
    with torch.no_grad():
        for _ in range(4):
            logits = policy(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits.float(), -1), 1)], 1)
        old = log_probabilities(policy, ids)
    rewards = torch.tensor([float(sum(row) % 7) for row in ids.tolist()], device="cuda").view(-1, group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    policy.train()
    for _ in range(2):
        ratio = torch.exp(log_probabilities(policy, ids) - old)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
