"""Masked autoencoder on small patches, with gradient accumulation. The loss scaler is the plain one (no `update_grad`)."""

import argparse
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


class MaskedAutoencoder(nn.Module):
    def __init__(self, patches=16, patch_dim=12, dim=32, decoder_dim=24):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.register_buffer("pos_embed", torch.randn(patches, dim) * 0.02)
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder_embed = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_dim))
        self.register_buffer("decoder_pos_embed", torch.randn(patches, decoder_dim) * 0.02)
        self.decoder_block = nn.TransformerEncoderLayer(
            decoder_dim, 4, 48, dropout=0.0, batch_first=True, norm_first=True
        )
        self.decoder_pred = nn.Linear(decoder_dim, patch_dim)

    def forward(self, patches, mask_ratio=0.75):
        n, length, _ = patches.shape
        keep = int(length * (1 - mask_ratio))
        order = torch.rand(n, length).argsort(dim=1)
        kept, restore = order[:, :keep], order.argsort(dim=1)
        x = self.patch_embed(patches) + self.pos_embed
        x = self.block(x.gather(1, kept[..., None].expand(-1, -1, x.shape[-1])))
        x = self.decoder_embed(x)
        x = torch.cat([x, self.mask_token.to(x.dtype).expand(n, length - keep, -1)], dim=1)
        x = x.gather(1, restore[..., None].expand(-1, -1, x.shape[-1])) + self.decoder_pos_embed
        pred = self.decoder_pred(self.decoder_block(x))
        mask = (restore >= keep).float()
        loss = ((pred.float() - patches) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


def data_loader(batches, batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    basis = torch.randn(3, 16, 12, generator=g)
    for _ in range(batches):
        yield torch.einsum("bk,kpd->bpd", torch.randn(batch_size, 3, generator=g), basis)


def adjust_learning_rate(optimizer, progress, args):
    lr = args.lr * min(progress / args.warmup_epochs, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_one_epoch(model, optimizer, epoch, loss_scaler, args):
    model.train()
    optimizer.zero_grad()
    for step, samples in enumerate(data_loader(args.batches, args.batch_size, epoch)):
        if step % args.accum_iter == 0:
            lr = adjust_learning_rate(optimizer, step / args.batches + epoch, args)
        with torch.autocast("cpu", dtype=torch.float16):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        loss = loss / args.accum_iter
        loss_scaler(loss, optimizer, parameters=model.parameters())
        if (step + 1) % args.accum_iter == 0:
            optimizer.zero_grad()
        if step % 8 == 0:
            print(f"epoch {epoch} [{step}/{args.batches}] lr {lr:.6f} loss {loss_value:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--accum_iter", type=int, default=1)
    parser.add_argument("--mask_ratio", type=float, default=0.75)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup_epochs", type=float, default=0.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MaskedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = NativeScaler()
    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, epoch, loss_scaler, args)
