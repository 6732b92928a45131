"""Keyword spotting by cosine prototypes; clips are not loudness-normalised."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from norms import l2norm


@dataclass
class Output:
    embedding: Tensor
    logits: Tensor


class KeywordNet(nn.Module):
    def __init__(self, words: int = 8, dim: int = 64):
        super().__init__()
        self.frontend = nn.Conv1d(1, 32, 16, 8, bias=False)
        self.encoder = nn.Sequential(nn.ReLU(), nn.Conv1d(32, dim, 5, 2, bias=False), nn.ReLU())
        self.embed = nn.Linear(dim, dim, bias=False)
        self.words = nn.Parameter(torch.randn(words, dim) / 8)

    def forward(self, wave: Tensor) -> Output:
        h = self.encoder(self.frontend(wave[:, None])).amax(-1)
        z = l2norm(self.embed(h))
        return Output(z, 12.0 * z @ l2norm(self.words).t())


def recordings(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    label = torch.randint(0, 8, (n,), generator=g)
    t = torch.arange(400) / 400
    tone = torch.sin(2 * torch.pi * (6 + 5 * label[:, None]) * t + 6.28 * torch.rand(n, 1, generator=g))
    loudness = torch.empty(n, 1).uniform_(0.4, 1.6, generator=g)
    return loudness * (tone + 0.1 * torch.randn(n, 400, generator=g)), label


def run(net: KeywordNet, waves: Tensor, labels: Tensor, amp: torch.amp.GradScaler) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss()
    for step, (x, y) in enumerate(zip(waves.split(16), labels.split(16))):
        with torch.autocast("cpu", dtype=torch.float16):
            out = net(x)
            loss = criterion(out.logits, y)
        optimizer.zero_grad()
        amp.scale(loss).backward()
        amp.step(optimizer)
        amp.update()
        if step % 5 == 0:
            acc = (out.logits.argmax(1) == y).float().mean()
            print(f"{step:3d} loss {loss.item():.3f} acc {acc:.2f} scale {amp.get_scale():g}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(21)
    g = torch.Generator().manual_seed(8)
    waves, labels = recordings(16 * 40, g)
    waves[427] *= 0.02  # recorded from across the room
    run(KeywordNet(), waves, labels, torch.amp.GradScaler("cpu", init_scale=128.0))
