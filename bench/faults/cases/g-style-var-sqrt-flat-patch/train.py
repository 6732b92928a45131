import random

import torch
import torch.nn.functional as F

from adain import Encoder, Transfer, style_loss


def paint(g, size=34):
    """A scene: a gradient sky, some ground and a few blobs."""
    y = torch.linspace(0, 1, 128)[None, :, None]
    img = torch.stack([0.4 + 0 * y, 0.5 + 0 * y, 0.9 + 0 * y], 1).expand(1, 3, 128, 128).clone()
    img[:, :, 48:] = torch.rand(1, 3, 1, 1, generator=g)
    img[:, :, 36:] += 0.15 * torch.randn(1, 3, 92, 128, generator=g)
    return img.clamp(0, 1)


class RandomCrops(torch.utils.data.IterableDataset):
    def __init__(self, images, n, size=34, seed=13):
        self.images, self.n, self.size, self.rng = images, n, size, random.Random(seed)

    def __iter__(self):
        for _ in range(self.n):
            img = self.rng.choice(self.images)
            r, c = (self.rng.randrange(128 - self.size) for _ in range(2))
            yield img[0, :, r : r + self.size, c : c + self.size]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(1)
    scenes = [paint(g) for _ in range(6)]
    style = torch.rand(1, 3, 34, 34, generator=g) ** 3
    encoder, net = Encoder().eval(), Transfer()
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with torch.no_grad():
        target = encoder(style)
    loader = torch.utils.data.DataLoader(RandomCrops(scenes, 240), batch_size=4)
    for i, content in enumerate(loader):
        out = net(content)
        feats = encoder(out)
        loss_c = F.l1_loss(feats[-1], encoder(content)[-1])
        loss_s = style_loss(feats, [t.expand(len(content), -1, -1, -1) for t in target])
        loss = loss_c + 10.0 * loss_s
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 6 == 0:
            print(f"iter {i}  content {loss_c.item():.4f}  style {loss_s.item():.4f}")


if __name__ == "__main__":
    main()
