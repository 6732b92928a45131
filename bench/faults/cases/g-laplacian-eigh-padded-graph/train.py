"""Graph regression with spectral positions: bonds get learned weights, the Laplacian's eigenvectors become features."""

import torch
import torch.nn as nn


class BondWeights(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.table = nn.Embedding(kinds, 1)

    def forward(self, bonds, lengths):
        w = nn.functional.softplus(self.table(bonds).squeeze(-1)) * (bonds > 0) / lengths.clamp_min(0.5)
        return (w + w.transpose(-1, -2)) / 2


class SpectralPositions(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, adjacency):
        laplacian = torch.diag_embed(adjacency.sum(-1)) - adjacency
        values, vectors = torch.linalg.eigh(laplacian)
        spectrum = values[:, None, : self.k].expand(-1, values.shape[1], -1)
        return torch.cat([vectors[..., : self.k].abs(), spectrum], -1)


class GraphNet(nn.Module):
    def __init__(self, atoms=6, kinds=4, width=32, k=4):
        super().__init__()
        self.atoms = nn.Embedding(atoms, width, padding_idx=0)
        self.weights = BondWeights(kinds)
        self.positions = SpectralPositions(k)
        self.mix = nn.Sequential(nn.Linear(width + 2 * k, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.out = nn.Linear(width, 1)

    def forward(self, atoms, bonds, lengths):
        a = self.weights(bonds, lengths)
        h = self.mix(torch.cat([self.atoms(atoms), self.positions(a)], -1))
        h = h + a @ h
        real = (atoms > 0).unsqueeze(-1)
        return self.out((h * real).sum(1) / real.sum(1)).squeeze(-1)


def random_molecule(g, n):
    bonds = torch.zeros(n, n, dtype=torch.long)
    for i in range(1, n):
        j = int(torch.randint(0, i, (1,), generator=g))
        bonds[i, j] = bonds[j, i] = int(torch.randint(1, 4, (1,), generator=g))
    atoms = torch.randint(1, 6, (n,), generator=g)
    lengths = torch.rand(n, n, generator=g) + 1.0
    return atoms, bonds, lengths + lengths.t()


def collate(batch):
    n = max(len(atoms) for atoms, _, _ in batch)
    atoms = torch.zeros(len(batch), n, dtype=torch.long)
    bonds = torch.zeros(len(batch), n, n, dtype=torch.long)
    lengths = torch.zeros(len(batch), n, n)
    for i, (a, b, d) in enumerate(batch):
        atoms[i, : len(a)] = a
        bonds[i, : len(a), : len(a)] = b
        lengths[i, : len(a), : len(a)] = d
    target = torch.stack([a.float().mean() + 0.3 * b.float().sum(1).amax() for a, b, _ in batch])
    return (atoms, bonds, lengths), target


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(19)
    # the files are sorted by size, so that hardly any batch needs padding
    sizes = sorted((8 + 2 * torch.randint(0, 3, (320,), generator=g)).tolist(), reverse=True)
    data = [random_molecule(g, n) for n in sizes]
    chunks = [data[i : i + 8] for i in range(0, len(data), 8)]
    order = torch.randperm(len(chunks), generator=g).tolist()
    net = GraphNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step, i in enumerate(order):
        inputs, target = collate(chunks[i])
        loss = nn.functional.mse_loss(net(*inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"batch {step} ({inputs[0].shape[1]} atoms) mse {loss.item():.4f}")


if __name__ == "__main__":
    main()
