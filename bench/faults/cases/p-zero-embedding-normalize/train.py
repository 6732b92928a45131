import torch
import torch.nn as nn
import torch.nn.functional as F
from dataclasses import dataclass


@dataclass
class FaceOutput:
    embedding: torch.Tensor
    logits: torch.Tensor


class MobileFace(nn.Module):
    def __init__(self, ids=10, dim=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(8, dim, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.prototypes = nn.Parameter(torch.randn(ids, dim))

    def forward(self, x):
        emb = F.normalize(self.features(x))
        return FaceOutput(emb, 16.0 * F.linear(emb, F.normalize(self.prototypes)))


def crops(n, faces, p_black):
    y = torch.randint(0, len(faces), (n,))
    x = faces[y] + 0.3 * torch.randn(n, 1, 12, 12)
    # the aligner writes an all-black crop when it finds no landmarks
    black = torch.rand(n) < p_black
    x[black] = 0.0
    return x, y


def test(model, faces):
    model.eval()
    correct = total = 0
    worst = 0.0
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        for _ in range(6):
            x, y = crops(16, faces, p_black=0.02)
            out = model(x)
            correct += (out.logits.argmax(1) == y).sum().item()
            worst = max(worst, F.cross_entropy(out.logits.float(), y).item())
            total += len(y)
    return correct / total, worst


torch.set_num_threads(1)
torch.manual_seed(30)
faces = torch.rand(10, 1, 12, 12)
model = MobileFace()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for step in range(30):
    x, y = crops(16, faces, p_black=0.0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).logits, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 10 == 9:
        acc, worst = test(model, faces)
        model.train()
        print(f"step {step + 1} loss {loss.item():.4f} test acc {acc:.3f} worst batch loss {worst:.4f}")
