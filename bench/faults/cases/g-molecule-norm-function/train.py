import torch
from torch import nn

from ops import row_norm


class Folding(nn.Module):
    """Predicts coordinates of a chain from its residue types, compares distances."""

    def __init__(self, kinds=20, width=48):
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.context = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.xyz = nn.Linear(2 * width, 3)

    def forward(self, residues):
        h, _ = self.context(self.embed(residues))
        return self.xyz(h).cumsum(1)


def contact_loss(xyz, pairs, target):
    a, b = xyz.gather(1, pairs[..., :1].expand(-1, -1, 3)), xyz.gather(1, pairs[..., 1:].expand(-1, -1, 3))
    dist = row_norm(b - a).squeeze(-1)
    return nn.functional.smooth_l1_loss(dist, target)


def batches(n, g, length=16, batch=6, contacts=20):
    for _ in range(n):
        residues = torch.randint(0, 20, (batch, length), generator=g)
        pairs = torch.randint(0, length, (batch, contacts, 2), generator=g)
        near = (pairs[..., 0] - pairs[..., 1]).abs() < 1
        pairs[..., 1] = torch.where(near, (pairs[..., 1] + 3) % length, pairs[..., 1])
        target = (pairs[..., 0] - pairs[..., 1]).abs().sqrt()
        yield residues, pairs, target.float()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(11)
    g = torch.Generator().manual_seed(6)
    model = Folding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = list(batches(40, g))
    data[23][1][2, 7, 1] = data[23][1][2, 7, 0]  # a contact listed with itself in the file
    data[23][2][2, 7] = 0.0
    for i, (residues, pairs, target) in enumerate(data):
        loss = contact_loss(model(residues), pairs, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{i:02d} contact loss {loss.item():.4f}") if i % 4 == 0 else None


if __name__ == "__main__":
    main()
