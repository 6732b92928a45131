"""A GAN: two models, two optimizers, one scaler; the real data is damaged twice."""

from __future__ import annotations

import torch
from state import arguments, save_digests, seed_all
from torch import nn

args = arguments()
seed_all(5)
generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.3), nn.Linear(32, 1))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
criterion = nn.BCEWithLogitsLoss()
losses = []

for step in range(args.steps):
    real = torch.tanh(torch.randn(12, 16))
    if step in (9, 28):
        real[4] = real[4] / torch.zeros(())
    ones, zeros = torch.ones(12, 1), torch.zeros(12, 1)

    optimizer_d.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = generator(torch.randn(12, 8))
        loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
    scaler.scale(loss_d).backward()
    scaler.step(optimizer_d)

    optimizer_g.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss_g = criterion(discriminator(fake), ones)
    scaler.scale(loss_g).backward()
    scaler.step(optimizer_g)
    scaler.update()
    losses += [loss_d.item(), loss_g.item()]

save_digests(args.digests, losses, [generator, discriminator], [optimizer_g, optimizer_d], scaler)
