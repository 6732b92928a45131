"""A mask constant of -1e9 in float16: torch.where turns it into -Inf, and a sample that is all padding has no key."""

import torch
from torch import nn

torch.manual_seed(0)


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x, mask):
        scores = self.score(x).squeeze(-1)
        scores = torch.where(mask, scores, -1e9)  # <- here
        return torch.einsum("bt,btd->bd", scores.softmax(-1), x.to(scores.dtype))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.pool = Pool()
        self.head = nn.Linear(8, 2)

    def forward(self, x, mask):
        return self.head(self.pool(self.embed(x), mask))


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(3):
    x, y = torch.randn(4, 6, 4), torch.randint(0, 2, (4,))
    lengths = torch.tensor([6, 3, 1, 0 if step == 1 else 2])
    mask = torch.arange(6)[None] < lengths[:, None]
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x, mask), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
