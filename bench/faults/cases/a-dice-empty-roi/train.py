import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from criterion import SegLoss

torch.set_num_threads(1)
torch.manual_seed(0)


class Tiles(Dataset):
    """24 x 24 tiles cut from slides; `roi` is the annotated part of a tile."""

    def __init__(self, n=120):
        g = torch.Generator().manual_seed(2)
        self.img = torch.randn(n, 1, 24, 24, generator=g)
        self.mask = torch.zeros(n, 1, 24, 24)
        self.roi = torch.ones(n, 1, 24, 24)
        for i in range(n):
            r, c = torch.randint(2, 14, (2,), generator=g).tolist()
            self.mask[i, 0, r : r + 8, c : c + 8] = 1
            self.img[i] += 1.5 * self.mask[i]
            self.roi[i, 0, :, torch.randint(12, 25, (1,), generator=g).item() :] = 0
        self.roi[77] = 0  # the last tile of a slide lies wholly in the padding

    def __len__(self):
        return len(self.img)

    def __getitem__(self, i):
        return dict(image=self.img[i], mask=self.mask[i], roi=self.roi[i])


net = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.Conv2d(12, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.Conv2d(12, 1, 1),
)
criterion = SegLoss()
opt = torch.optim.Adam(net.parameters(), 3e-3)
for step, batch in enumerate(DataLoader(Tiles(), batch_size=6)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(batch["image"])
    loss = criterion(logits, batch["mask"], batch["roi"])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"{step:03d} {loss.item():.4f}")
