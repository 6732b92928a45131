import logging

import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, dim=20, hidden=24):
        super().__init__()
        self.project = nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x, mask):
        h = torch.tanh(self.project(x)) * mask[..., None]
        return self.out(h)


class EnergyLoss(nn.Module):
    """The length of each frame's embedding should follow the frame's energy."""

    def forward(self, embedding, energy, mask):
        length = (embedding * mask[..., None]).pow(2).sum(-1).sqrt()
        return ((length - energy) * mask).abs().sum() / mask.sum()


def utterances(n, generator):
    for i in range(n):
        lengths = torch.full((6,), 12)
        if i == 9:
            lengths[2:] = 7  # the first batch with padding
        mask = (torch.arange(12)[None, :] < lengths[:, None]).float()
        feats = torch.randn(6, 12, 20, generator=generator) * mask[..., None]
        yield feats, feats.pow(2).mean(-1).sqrt(), mask


def train_one_epoch(model, criterion, optimizer, batches, accum_grad=1, grad_clip=5.0):
    skipped = 0
    for iiter, (feats, energy, mask) in enumerate(batches):
        loss = criterion(model(feats, mask), energy, mask) / accum_grad
        loss.backward()
        if (iiter + 1) % accum_grad:
            continue
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        if not torch.isfinite(grad_norm):
            skipped += 1
            logging.warning("The grad norm is %s. Skipping updating the model.", grad_norm.item())
            continue
        optimizer.step()
        optimizer.zero_grad()
        if iiter % 5 == 0:
            logging.info("iter %d loss %.4f", iiter, loss.item())
    logging.info("skipped %d", skipped)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Encoder()
    generator = torch.Generator().manual_seed(0)
    train_one_epoch(net, EnergyLoss(), torch.optim.Adam(net.parameters(), 1e-3), utterances(30, generator))
