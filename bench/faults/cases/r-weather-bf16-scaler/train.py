"""Forecast a field one step ahead on a periodic grid. Mixed precision by configuration: dtype and backend."""

import contextlib
from dataclasses import dataclass, field

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class RunConfig:
    with_mixed_precision: bool = True
    attention_dtype: str = "bf16"
    lr: float = 2e-3
    grad_clip: float = 1.0
    samples_per_epoch: int = 20
    num_epochs: int = 2
    batch_size: int = 8
    grid: tuple[int, int] = field(default=(12, 24))


class Forecaster(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.encode = nn.Conv2d(2, channels, 3, padding=1, padding_mode="circular")
        self.process = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, channels),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular"),
            )
            for _ in range(3)
        )
        self.decode = nn.Conv2d(channels, 2, 1)

    def forward(self, state):
        x = self.encode(state)
        for layer in self.process:
            x = x + layer(x)
        return state + self.decode(x)


class Trainer:
    def __init__(self, cf):
        self.cf = cf
        self.model = Forecaster()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cf.lr)
        self.grad_scaler = torch.amp.GradScaler("cpu")
        self.dtype = DTYPES[cf.attention_dtype]

    def precision(self):
        if not self.cf.with_mixed_precision:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype)

    def batches(self, epoch):
        g = torch.Generator().manual_seed(100 + epoch)
        h, w = self.cf.grid
        for _ in range(self.cf.samples_per_epoch):
            coarse = torch.randn(self.cf.batch_size, 2, h // 4, w // 4, generator=g)
            state = nn.functional.interpolate(coarse, size=(h, w), mode="bilinear", align_corners=False)
            yield state, torch.roll(state, 1, dims=-1)  # everything drifts east

    def run(self):
        for epoch in range(self.cf.num_epochs):
            self.train(epoch)

    def train(self, epoch):
        self.model.train()
        total = 0.0
        for state, target in self.batches(epoch):
            with self.precision():
                preds = self.model(state)
            loss = nn.functional.mse_loss(preds.float(), target)
            self.optimizer.zero_grad()
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.cf.grad_clip)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
            total += loss.item()
        print(f"epoch {epoch}: mse {total / self.cf.samples_per_epoch:.5f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    Trainer(RunConfig()).run()
