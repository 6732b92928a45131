"""Train at 32 pixels, test at larger sizes, everything under AMP."""

import torch
import torch.nn.functional as F

from vssm import VSSM

AMP = {"device_type": "cpu", "dtype": torch.float16}


def images(n, size, generator):
    label = torch.randint(0, 4, (n,), generator=generator)
    x = torch.randn(n, 3, size, size, generator=generator) * 0.5
    x += (label.float() / 2)[:, None, None, None]
    return x, label


@torch.no_grad()
def validate(model, size, generator):
    model.eval()
    x, label = images(4, size, generator)
    with torch.autocast(**AMP):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), label)
    model.train()
    return loss.item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    model = VSSM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(12):
        x, label = images(8, 32, generator)
        with torch.autocast(**AMP):
            loss = F.cross_entropy(model(x).float(), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 4 == 3:
            print(f"step {step} loss {loss.item():.4f} val@32 {validate(model, 32, generator):.4f}")
    for size in (64, 128):
        print(f"test@{size}: loss {validate(model, size, generator):.4f}")


if __name__ == "__main__":
    main()
