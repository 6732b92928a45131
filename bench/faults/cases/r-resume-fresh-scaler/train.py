"""Track points through short clips. The queue gives a job 30 updates at a time; the next one goes on from the file."""

import tempfile
from pathlib import Path

import torch
from torch import nn


class Tracker(nn.Module):
    """Refine the positions of points in all frames by what a small GRU sees of the displacement so far."""

    def __init__(self, hidden=32, iters=3):
        super().__init__()
        self.iters = iters
        self.encode = nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.update = nn.GRU(hidden, hidden, batch_first=True)
        self.delta = nn.Linear(hidden, 2)

    def forward(self, observed, start):
        tracks = start[:, None].expand_as(observed)
        predictions = []
        for _ in range(self.iters):
            h, _ = self.update(self.encode(torch.cat([observed - tracks, tracks], dim=-1)))
            tracks = tracks.detach() + self.delta(h)
            predictions.append(tracks)
        return predictions


def sequence_loss(predictions, truth, gamma=0.8):
    n = len(predictions)
    return sum(gamma ** (n - 1 - i) * (p.float() - truth).abs().mean() for i, p in enumerate(predictions))


def clips(step, batch=8, frames=10):
    g = torch.Generator().manual_seed(1000 + step)
    start = torch.rand(batch, 2, generator=g)
    speed = 0.1 * torch.randn(batch, 1, 2, generator=g)
    truth = start[:, None] + speed * torch.arange(frames)[None, :, None]
    return truth + 0.05 * torch.randn(truth.shape, generator=g), start, truth


def save(path, model, optimizer, scheduler, total_steps):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "total_steps": total_steps,
        },
        path,
    )


def job(path, updates=30, log_every=10):
    model = Tracker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    total_steps = 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        total_steps = state["total_steps"]
        print(f"resuming from step {total_steps}")
    model.train()
    for _ in range(updates):
        observed, start, truth = clips(total_steps)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = sequence_loss(model(observed, start), truth)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        if total_steps % log_every == 0:
            print(f"step {total_steps} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
        total_steps += 1
    save(path, model, optimizer, scheduler, total_steps)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(23)
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(2):
            job(Path(scratch) / "model_last.pth")
