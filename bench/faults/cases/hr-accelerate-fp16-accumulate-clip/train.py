"""Accelerate in real float16 with accumulation, clipping and a schedule; an encoder and a head, one optimizer for both."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, width=24, hidden=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.encoder(x)).squeeze(-1)


def float16_on_cpu(**kwargs):
    """Accelerate ignores fp16 on the CPU; switch on what it does on a GPU."""
    accelerator = Accelerator(mixed_precision="fp16", cpu=True, **kwargs)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21)  # too high on purpose: it has to settle
    return accelerator


def main():
    torch.set_num_threads(1)
    set_seed(8)
    accelerator = float16_on_cpu(gradient_accumulation_steps=4)
    x = torch.randn(640, 24)
    y = torch.sin(x[:, :4]).sum(1)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=60)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    skipped = 0
    for epoch in range(3):
        for i, (features, target) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(features), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped += optimizer.step_was_skipped
            if i % 20 == 0:
                print(f"epoch {epoch} batch {i} loss {loss.item():.4f} scale {accelerator.scaler.get_scale():.0f}")
    print(f"{skipped} updates skipped while the scale settled; last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
