import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def seed_everything(seed: int = 42):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


class SnippetEncoder(nn.Module):
    def __init__(self, in_dim, dim):
        super().__init__()
        self.proj = nn.Linear(in_dim, dim)
        self.temporal = nn.Conv1d(dim, dim, 3, padding=1, groups=4)

    def forward(self, feats):
        h = self.proj(feats)
        return h + self.temporal(h.transpose(1, 2)).transpose(1, 2)


class PromptClassifier(nn.Module):
    """Cosine classifier over class prompts, with one learnt background vector for untrimmed videos."""

    def __init__(self, classes, dim):
        super().__init__()
        self.prompts = nn.Parameter(torch.randn(classes, dim) * 0.02)
        self.bg_embedding = nn.Parameter(torch.empty(1, dim))
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, h, with_background):
        bank = self.prompts
        if with_background:
            bank = torch.cat([self.prompts, self.bg_embedding], dim=0)
        return self.scale * F.normalize(h, dim=-1) @ F.normalize(bank, dim=-1).t()


class Localizer(nn.Module):
    def __init__(self, in_dim=40, dim=32, classes=5):
        super().__init__()
        self.encoder = SnippetEncoder(in_dim, dim)
        self.classifier = PromptClassifier(classes, dim)

    def forward(self, feats, with_background=False):
        return self.classifier(self.encoder(feats), with_background)


def batches(n, classes=5):
    g = torch.Generator().manual_seed(1)
    centers = torch.randn(classes + 1, 40, generator=g)
    for i in range(n):
        trimmed = i < 9  # warm up on trimmed clips, then whole videos
        y = torch.randint(0, classes if trimmed else classes + 1, (4, 12), generator=g)
        yield centers[y] + 0.5 * torch.randn(4, 12, 40, generator=g), y, not trimmed


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed_everything()
    model = Localizer()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (feats, y, untrimmed) in enumerate(batches(18)):
        logits = model(feats, with_background=untrimmed)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        print("step", step, "loss", round(loss.item(), 4))
