# 2x super resolution without batch norm (EDSR keeps activations unnormalised)
import math
import random

import numpy as np
import torch
import torch.nn as nn


def set_seed(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


class ResBlock(nn.Module):
    def __init__(self, ch, res_scale=1.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ch, ch, 3, padding=1),
            nn.LeakyReLU(0.1, True),
            nn.Conv2d(ch, ch, 3, padding=1),
        )
        self.res_scale = res_scale

    def forward(self, x):
        return x + self.body(x) * self.res_scale


class EDSR(nn.Module):
    def __init__(self, ch=8, blocks=5):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 3, padding=1)
        self.trunk = nn.ModuleDict({f"block{i}": ResBlock(ch) for i in range(blocks)})
        self.tail = nn.Sequential(nn.Conv2d(ch, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x):
        x = self.head(x)
        for block in self.trunk.values():
            x = block(x)
        return self.tail(x)


class Photos(torch.utils.data.Dataset):
    """Low/high resolution pairs: 8 bit files, and a few 14 bit raw frames that slipped into the folder."""

    def __init__(self, n=96, size=10):
        rng = np.random.default_rng(0)
        self.img = []
        for i in range(n):
            if i % 43 == 42:
                self.img.append(rng.integers(0, 16384, (3, size, size)).astype(np.uint16))
            else:
                self.img.append(rng.integers(0, 256, (3, size, size)).astype(np.uint8))

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        img = torch.from_numpy(self.img[i].astype(np.float32))
        lr = img / 255.0 if self.img[i].dtype == np.uint8 else img
        hr = torch.nn.functional.interpolate(lr[None], scale_factor=2, mode="bilinear")[0]
        return lr, hr


def psnr(mse):
    return 10 * math.log10(1.0 / max(mse, 1e-9)) if math.isfinite(mse) else float("nan")


if __name__ == "__main__":
    torch.set_num_threads(1)
    set_seed(11)
    model = EDSR()
    for m in model.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight)
    optim = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    l1 = nn.L1Loss()
    loader = torch.utils.data.DataLoader(Photos(), batch_size=2, shuffle=True, num_workers=0)
    for it, (lr_img, hr_img) in enumerate(loader):
        with torch.autocast("cpu", torch.float16):
            sr = model(lr_img)
            loss = l1(sr, hr_img)
        optim.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        if it % 4 == 0:
            print(f"[{it:04d}] l1 {loss.item():.3f} psnr {psnr(((sr.float() - hr_img) ** 2).mean().item()):.2f}")
