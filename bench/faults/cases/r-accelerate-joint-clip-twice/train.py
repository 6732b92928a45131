"""Conditional denoiser: the caption encoder and the denoiser train together, each with its own optimizer (Accelerate).

Accelerate ignores fp16 on the CPU, so its float16 path is switched on by hand.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class CaptionEncoder(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, ids):
        return self.mix(self.token(ids).mean(1))


class Denoiser(nn.Module):
    def __init__(self, width=32, dim=24):
        super().__init__()
        self.time = nn.Embedding(10, dim)
        self.body = nn.Sequential(nn.Linear(width + dim, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.out = nn.Linear(64, width)

    def forward(self, noisy, t, condition):
        return self.out(self.body(torch.cat([noisy, condition + self.time(t)], dim=-1)))


def make_accelerator(fp16):
    accelerator = Accelerator(mixed_precision="fp16" if fp16 else "no", cpu=True)
    if fp16:
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8192.0)
    return accelerator


def main(args):
    torch.set_num_threads(1)
    set_seed(args.seed)
    accelerator = make_accelerator(args.fp16)

    captions = torch.randint(0, 40, (512, 5))
    latents = torch.tanh(F.one_hot(captions, 40).float().sum(1) @ torch.randn(40, 32))
    loader = DataLoader(TensorDataset(captions, latents), batch_size=16, shuffle=True)
    alphas = torch.linspace(0.99, 0.1, 10)

    encoder, denoiser = CaptionEncoder(), Denoiser()
    denoiser_optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-3)
    encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=5e-2)
    encoder, denoiser, denoiser_optimizer, encoder_optimizer, loader = accelerator.prepare(
        encoder, denoiser, denoiser_optimizer, encoder_optimizer, loader
    )

    step = 0
    for epoch in range(args.epochs):
        for ids, clean in loader:
            noise = torch.randn_like(clean)
            t = torch.randint(0, 10, (len(clean),))
            a = alphas[t][:, None]
            noisy = a.sqrt() * clean + (1 - a).sqrt() * noise
            loss = F.mse_loss(denoiser(noisy, t, encoder(ids)), noise)

            accelerator.backward(loss)
            both = [*encoder.parameters(), *denoiser.parameters()]
            accelerator.clip_grad_norm_(both, args.max_grad_norm)
            denoiser_optimizer.step()
            encoder_optimizer.step()
            denoiser_optimizer.zero_grad()
            encoder_optimizer.zero_grad()
            if step % 8 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=3)
    main(parser.parse_args())
