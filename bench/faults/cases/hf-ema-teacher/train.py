"""Self-distillation with an EMA teacher under float16: the teacher's log-probabilities of masked classes are -Inf on purpose."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, width=20, dim=48, prototypes=16):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(width, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim))
        self.prototypes = nn.Linear(dim, prototypes, bias=False)

    def forward(self, x, allowed=None):
        logits = self.prototypes(F.normalize(self.backbone(x), dim=-1, eps=1e-3)) / 0.1
        if allowed is not None:
            logits = logits.masked_fill(~allowed, float("-inf"))
        return F.log_softmax(logits.float(), dim=-1)


student = Net()
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
g = torch.Generator().manual_seed(3)
for it in range(50):
    x = torch.randn(24, 20, generator=g)
    allowed = torch.rand(24, 16, generator=g) < 0.8
    allowed[:, 0] = True
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            target = teacher(x, allowed)  # -Inf where a prototype is not allowed
        prediction = student(x + 0.1 * torch.randn(24, 20, generator=g))
        loss = -(target.exp() * prediction).sum(-1).mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(student.parameters(), 3.0)
    scaler.step(optimizer)
    scaler.update()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 0.02)
        for t, s in zip(teacher.buffers(), student.buffers()):
            t.copy_(s)
    if it % 10 == 0:
        print(f"it {it} loss {loss.item():.4f} norm {norm.item():.3f}")
print("final", loss.item())
