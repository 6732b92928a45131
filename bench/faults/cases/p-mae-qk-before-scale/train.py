import argparse

import torch
from torch.utils.data import DataLoader, Dataset

from engine_pretrain import train_one_epoch
from models_mae import MaskedAutoencoderViT
from util.misc import NativeScalerWithGradNormCount as NativeScaler


class Textures(Dataset):
    """Images made of two oriented waves each."""

    def __init__(self, n, size=16):
        g = torch.Generator().manual_seed(1)
        yy, xx = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
        f = torch.rand(n, 3, 2, 1, 1, generator=g) * 20 - 10
        ph = torch.rand(n, 3, 1, 1, generator=g) * 6.28
        self.x = torch.sin(f[:, :, 0] * xx + f[:, :, 1] * yy + ph)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


def get_args_parser():
    p = argparse.ArgumentParser("MAE pre-training", add_help=False)
    p.add_argument("--batch_size", default=8, type=int)
    p.add_argument("--epochs", default=3, type=int)
    p.add_argument("--mask_ratio", default=0.5, type=float)
    p.add_argument("--lr", default=2e-2, type=float)
    p.add_argument("--seed", default=0, type=int)
    return p


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    loader = DataLoader(Textures(160), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = MaskedAutoencoderViT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    loss_scaler = NativeScaler()
    for epoch in range(args.epochs):
        train_one_epoch(model, loader, optimizer, epoch, loss_scaler, args)


if __name__ == "__main__":
    main(get_args_parser().parse_args())
