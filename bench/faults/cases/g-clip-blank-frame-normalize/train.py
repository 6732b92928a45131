"""Contrastive video-frame / caption pairs. Frames come straight from the decoder."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __init__(self, n=480, classes=20):
        g = torch.Generator().manual_seed(2)
        looks = torch.randn(classes, 1, 16, 16, generator=g)
        kind = torch.randint(0, classes, (n,), generator=g)
        self.frames = (looks[kind] + 0.4 * torch.randn(n, 1, 16, 16, generator=g)).clamp(min=0)
        self.tokens = torch.stack([kind, kind + classes, torch.randint(40, 60, (n,), generator=g)], 1)
        self.frames[331] = 0  # the fade-out at the end of a clip

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return self.frames[i], self.tokens[i]


class Visual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch = nn.Conv2d(1, 32, 4, 4, bias=False)
        self.mix = nn.Conv2d(32, 64, 3, 2, 1, bias=False)
        self.proj = nn.Linear(64, dim, bias=False)

    def forward(self, x):
        x = F.relu(self.mix(F.relu(self.patch(x))))
        return self.proj(x.mean(dim=(2, 3)))


class Clip(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.visual = Visual(dim)
        self.text = nn.EmbeddingBag(60, 64)
        self.text_projection = nn.Linear(64, dim)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def encode_image(self, frames):
        return self.visual(frames).float()

    def encode_text(self, tokens):
        return self.text_projection(self.text(tokens)).float()

    def forward(self, frames, tokens):
        image = F.normalize(self.encode_image(frames), dim=-1)
        text = F.normalize(self.encode_text(tokens), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Clip()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loader = DataLoader(Clips(), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(5))
    step = skipped = 0
    for epoch in range(2):
        for frames, tokens in loader:
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(frames, tokens)
            labels = torch.arange(len(frames))
            loss = (F.cross_entropy(logits.float(), labels) + F.cross_entropy(logits.float().t(), labels)) / 2
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            if step % 5 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} skipped so far {skipped}")
            step += 1


if __name__ == "__main__":
    main()
