"""The same with an epsilon that is not lost beside float16 features."""

import torch
from torch import nn

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, features, dim=8):
        super().__init__()
        self.project = nn.Linear(features, dim, bias=False)

    def forward(self, x):
        features = self.project(x)
        return nn.functional.normalize(features, dim=-1, eps=1e-2)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = Encoder(6)
        self.text = Encoder(5)

    def forward(self, images, texts):
        return self.image(images) @ self.text(texts).t() / 0.07


model = Clip()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
for step in range(4):
    images, texts = torch.randn(4, 6), torch.randn(4, 5)
    if step == 2:
        images[1] *= 1e-6
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(images, texts), torch.arange(4))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
