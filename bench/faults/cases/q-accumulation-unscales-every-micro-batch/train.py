import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_args():
    p = argparse.ArgumentParser("masked image modelling")
    p.add_argument("--batch-size", type=int, default=8)
    p.add_argument("--accumulation-steps", type=int, default=1)
    p.add_argument("--clip-grad", type=float, default=5.0)
    p.add_argument("--blr", type=float, default=4e-4)
    p.add_argument("--iters", type=int, default=48)
    return p.parse_args()


class MaskedMixer(nn.Module):
    def __init__(self, patches=16, patch_dim=48, dim=64, depth=3):
        super().__init__()
        self.embed = nn.Linear(patch_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.token_mix = nn.ModuleList(nn.Linear(patches, patches) for _ in range(depth))
        self.channel_mix = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, patch_dim)

    def forward(self, patches, mask):
        x = torch.where(mask[..., None], self.mask_token.to(patches.dtype), self.embed(patches))
        for tokens, channels in zip(self.token_mix, self.channel_mix):
            x = x + tokens(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x)


def patchified(args):
    g = torch.Generator().manual_seed(17)
    basis = torch.randn(6, 16 * 48, generator=g) / 2
    for _ in range(args.iters):
        x = torch.randn(args.batch_size, 6, generator=g) @ basis
        yield x.view(-1, 16, 48), torch.rand(args.batch_size, 16, generator=g) < 0.6


def train_one_epoch(args, model, data_loader, optimizer, scaler):
    model.train()
    optimizer.zero_grad()
    for idx, (patches, mask) in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.float16):
            recon = model(patches, mask)
            loss = F.l1_loss(recon[mask], patches[mask])

        if args.accumulation_steps > 1:
            loss = loss / args.accumulation_steps
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            if (idx + 1) % args.accumulation_steps == 0:
                scaler.step(optimizer)
                optimizer.zero_grad()
                scaler.update()
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if args.clip_grad:
                scaler.unscale_(optimizer)  # a single batch
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            scaler.step(optimizer)  # a single batch
            scaler.update()
        if idx % 8 == 0:
            print(
                f"[{idx}/{args.iters}] loss {loss.item() * args.accumulation_steps:.4f} scale {scaler.get_scale():.0f}"
            )


def main():
    args = get_args()
    torch.set_num_threads(1)
    torch.manual_seed(17)
    model = MaskedMixer()
    lr = args.blr * args.batch_size * args.accumulation_steps / 32
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    train_one_epoch(args, model, patchified(args), optimizer, torch.amp.GradScaler("cpu"))


if __name__ == "__main__":
    main()
