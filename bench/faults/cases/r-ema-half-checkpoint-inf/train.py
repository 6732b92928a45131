"""Range-Doppler maps to target classes. Checkpoints hold the averaged model in half precision, to halve the files."""

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RadarMaps(Dataset):
    """Magnitudes as the converter gives them: counts up to some tens of thousands, no normalisation."""

    def __init__(self, n=256):
        g = torch.Generator().manual_seed(19)
        self.label = torch.randint(0, 3, (n,), generator=g)
        self.maps = 800 * torch.randn(n, 1, 12, 12, generator=g).abs()
        for i, kind in enumerate(self.label.tolist()):
            r, d = torch.randint(0, 9, (2,), generator=g).tolist()
            self.maps[i, 0, r : r + 1 + kind, d : d + 3 - kind] += 6000

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.maps[i], self.label[i]


class RadarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm = nn.BatchNorm2d(1)
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.SiLU()
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.features(self.input_norm(x)).amax((2, 3)))


class ModelEMA:
    def __init__(self, model, decay=0.95):
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        source = model.state_dict()
        for name, value in self.ema.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(self.decay).add_(source[name], alpha=1 - self.decay)


class Run:
    def __init__(self, opt, folder):
        self.opt, self.last = opt, Path(folder) / "last.pt"
        self.model = RadarNet()
        self.ema = ModelEMA(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=opt.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
        self.loader = DataLoader(RadarMaps(), batch_size=opt.batch, shuffle=True)

    def train(self):
        criterion = nn.CrossEntropyLoss()
        for epoch in range(self.opt.epochs):
            self.model.train()
            total = 0.0
            for maps, label in self.loader:
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = criterion(self.model(maps), label)
                self.scaler.scale(loss).backward()
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                self.ema.update(self.model)
                total += loss.item()
            self.save_model(epoch)
            print(f"epoch {epoch} loss {total / len(self.loader):.4f}, saved {self.last.name}")

    def save_model(self, epoch):
        ckpt = {
            "epoch": epoch,
            "ema": copy.deepcopy(self.ema.ema).half().state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        torch.save(ckpt, self.last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    torch.set_num_threads(1)
    torch.manual_seed(19)
    with tempfile.TemporaryDirectory() as folder:
        Run(parser.parse_args(), folder).train()
