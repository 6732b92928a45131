import torch
from torch import nn


class PeakNorm(nn.Module):
    def forward(self, wav):
        peak = wav.abs().amax(dim=-1, keepdim=True)
        return wav / peak


class Frontend(nn.Module):
    def __init__(self, channels=24):
        super().__init__()
        self.peak = PeakNorm()
        self.filters = nn.Conv1d(1, channels, 64, stride=16)

    def forward(self, wav):
        x = self.peak(wav)
        return torch.log1p(self.filters(x.unsqueeze(1)).abs())


class SoundClassifier(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.frontend = Frontend()
        self.encoder = nn.Sequential(
            nn.Conv1d(24, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2), nn.ReLU()
        )
        self.classifier = nn.Linear(32, classes)

    def forward(self, wav):
        return self.classifier(self.encoder(self.frontend(wav)).amax(-1))


def make_clips(n, seed, augment):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(1024) / 8000
    y = torch.randint(0, 3, (n,), generator=g)
    f = torch.tensor([400.0, 900.0, 1800.0])[y]
    wav = torch.sin(2 * torch.pi * f[:, None] * t) * torch.rand(n, 1, generator=g)
    if augment:
        wav = wav + 0.01 * torch.randn(wav.shape, generator=g)
    else:
        wav[29] = 0.0  # one clip of the validation split is muted
    return wav, y


@torch.inference_mode()
def validate(model, wav, y, batch=10):
    model.eval()
    losses, hits = [], 0
    for i in range(0, len(y), batch):
        logits = model(wav[i : i + batch])
        losses.append(nn.functional.cross_entropy(logits, y[i : i + batch]))
        hits += int((logits.argmax(-1) == y[i : i + batch]).sum())
    return torch.stack(losses).mean().item(), hits / len(y)


def run():
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = SoundClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wav, y = make_clips(96, 0, augment=True)
    val_wav, val_y = make_clips(40, 1, augment=False)
    for epoch in range(3):
        model.train()
        perm = torch.randperm(len(y))
        for i in range(0, len(y), 16):
            idx = perm[i : i + 16]
            loss = nn.functional.cross_entropy(model(wav[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss, acc = validate(model, val_wav, val_y)
        print(f"epoch {epoch}: train {loss.item():.4f} val {val_loss:.4f} acc {acc:.2f}")


run()
