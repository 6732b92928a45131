import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from losses import ContrastiveLoss
from networks import EmbeddingNet, SiameseNet


class SiameseGlyphs(Dataset):
    """Pairs drawn anew for every item, as in the usual SiameseMNIST class."""

    def __init__(self, per_class=120, classes=10, size=14, length=800):
        rng = np.random.RandomState(33)
        shapes = rng.rand(classes, size, size) > 0.6
        noise = 0.25 * rng.randn(classes, per_class, size, size)
        self.images = (shapes[:, None] + noise).astype("float32")
        self.rng, self.length = rng, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        target = self.rng.randint(0, 2)
        a = self.rng.randint(len(self.images))
        b = a if target else (a + 1 + self.rng.randint(len(self.images) - 1)) % len(self.images)
        i, j = self.rng.randint(self.images.shape[1], size=2)
        return self.images[a, i][None], self.images[b, j][None], np.float32(target)


def train_epoch(loader, model, loss_fn, optimizer, log_interval):
    model.train()
    losses = []
    for batch_idx, (x1, x2, target) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(x1, x2)
        loss = loss_fn(*outputs, target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        if batch_idx % log_interval == 0:
            print(f"Train: [{batch_idx * len(target)}/{len(loader.dataset)}]\tLoss: {np.mean(losses):.6f}")
            losses = []


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = SiameseNet(EmbeddingNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_epoch(DataLoader(SiameseGlyphs(), batch_size=16), model, ContrastiveLoss(1.0), optimizer, 5)
