import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass
class Config:
    users: int = 400
    items: int = 900
    dim: int = 16
    lr: float = 2e-3
    steps: int = 40
    batch: int = 64
    clip: float = 10.0


@dataclasses.dataclass
class Scores:
    rating: Tensor
    click: Tensor


class ItemTower(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.table = nn.Embedding(cfg.items, cfg.dim).half()  # the biggest table: half the memory
        self.category = nn.Embedding(12, cfg.dim)
        self.project = nn.Linear(2 * cfg.dim, cfg.dim)

    def forward(self, item: Tensor) -> Tensor:
        return self.project(torch.cat([self.table(item), self.category(item % 12)], dim=-1))


class TwoTower(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(cfg.users, cfg.dim), nn.Linear(cfg.dim, cfg.dim), nn.Tanh())
        self.item = ItemTower(cfg)
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, user: Tensor, item: Tensor) -> Scores:
        u, v = self.user(user), self.item(item)
        rating = torch.einsum("bd,bd->b", u, v)
        click = rating * 0.5
        return Scores(rating + self.bias[0], click + self.bias[1])


def interactions(cfg: Config, generator: torch.Generator):
    taste = torch.randn(cfg.users, 4, generator=generator)
    kind = torch.randn(cfg.items, 4, generator=generator)
    for _ in range(cfg.steps):
        user = torch.randint(0, cfg.users, (cfg.batch,), generator=generator)
        item = torch.randint(0, cfg.items, (cfg.batch,), generator=generator)
        rating = (taste[user] * kind[item]).sum(-1).clamp(-2, 2)
        yield user, item, rating, (rating > 0).float()


def train(cfg: Config) -> None:
    model = TwoTower(cfg)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=cfg.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step, (user, item, rating, click) in enumerate(interactions(cfg, torch.Generator().manual_seed(9))):
        with torch.autocast("cpu", dtype=torch.float16):
            scores = model(user, item)
            loss = F.smooth_l1_loss(scores.rating.float(), rating)
            loss = loss + F.binary_cross_entropy_with_logits(scores.click.float(), click)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        scaler.step(optimizer)
        scaler.update()
        print(f"{step} {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(9)
    torch.set_num_threads(1)
    train(Config())
