"""MAE pre-training of multi-spectral tiles: the project's engine in small, with its exit on a bad loss."""

import argparse
import math
import sys

import torch
from torch import nn


class NativeScalerWithGradNormCount:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        parameters = list(parameters)
        self._scaler.unscale_(optimizer)
        if clip_grad is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        else:
            norm = torch.norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]))
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


class PatchEmbed(nn.Module):
    def __init__(self, bands, patch, dim):
        super().__init__()
        self.proj = nn.Conv2d(bands, dim, patch, patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class SpectralMAE(nn.Module):
    def __init__(self, bands=8, size=16, patch=4, dim=32):
        super().__init__()
        self.patch, tokens = patch, (size // patch) ** 2
        self.patch_embed = PatchEmbed(bands, patch, dim)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, tokens, dim))
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder_block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder_pred = nn.Linear(dim, bands * patch**2)

    def patchify(self, imgs):
        n, c, h, w = imgs.shape
        p = self.patch
        x = imgs.reshape(n, c, h // p, p, w // p, p)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, p * p * c)

    def forward(self, imgs, mask_ratio=0.75):
        x = self.patch_embed(imgs) + self.pos_embed
        n, length, dim = x.shape
        keep = int(length * (1 - mask_ratio))
        order = torch.rand(n, length).argsort(1)
        restore = order.argsort(1)
        x = self.block(x.gather(1, order[:, :keep, None].expand(-1, -1, dim)))
        x = torch.cat([x, self.mask_token.to(x.dtype).expand(n, length - keep, -1)], 1)
        x = x.gather(1, restore[..., None].expand(-1, -1, dim)) + self.pos_embed
        pred = self.decoder_pred(self.decoder_block(x))
        target = self.patchify(imgs)
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(-1)
        mask = (restore >= keep).float()
        return (loss * mask).sum() / mask.sum(), pred, mask


def tiles(count, batch):
    """Reflectances times 10,000, as the archive has them, after division by the bands' scales; some sun glint."""
    g = torch.Generator().manual_seed(17)
    scale = torch.tensor([0.3, 0.3, 0.4, 0.4, 0.5, 0.5, 0.02, 0.02])[None, :, None, None]
    for i in range(count):
        x = torch.rand(batch, 8, 16, 16, generator=g) * 3000 / 10000 / scale
        if i % 57 == 56:
            x[2, :, 4:9, 4:9] = 65535 / scale
        yield x


def train_one_epoch(model, optimizer, epoch, loss_scaler, args):
    model.train()
    optimizer.zero_grad()
    for step, samples in enumerate(tiles(args.batches, args.batch_size)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        loss = loss / args.accum_iter
        update = (step + 1) % args.accum_iter == 0
        norm = loss_scaler(loss, optimizer, parameters=model.parameters(), update_grad=update)
        if update:
            optimizer.zero_grad()
        if step % 10 == 9:
            print(f"epoch {epoch} [{step}] loss {loss_value:.4f} norm {norm:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=70)
    parser.add_argument("--accum_iter", type=int, default=2)
    parser.add_argument("--mask_ratio", type=float, default=0.75)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SpectralMAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    train_one_epoch(model, optimizer, 0, NativeScalerWithGradNormCount(), args)
