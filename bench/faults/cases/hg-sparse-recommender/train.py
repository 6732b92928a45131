"""Implicit feedback: two sparse tables, a dense tower. A batch touches a few dozen of thousands of rows."""

import torch
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, users=3000, items=5000, dim=16):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.item = nn.EmbeddingBag(items, dim, mode="mean", sparse=True)
        self.country = nn.Embedding(200, dim)  # dense gradient, nearly all of it zero
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, items, country):
        h = torch.cat([self.user(user), self.item(items), self.country(country)], -1)
        return self.mlp(h).squeeze(-1)


def sparse_and_dense(model):
    sparse = [p for m in (model.user, model.item) for p in m.parameters()]
    ids = {id(p) for p in sparse}
    return sparse, [p for p in model.parameters() if id(p) not in ids]


def clicks(g, batch=32):
    user = torch.randint(0, 3000, (batch,), generator=g)
    items = torch.randint(0, 5000, (batch, 4), generator=g)
    country = user % 7
    label = ((user % 2 + items[:, 0] % 2) == 1).float()
    return user, items, country, label


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(9)
    model = TwoTower()
    sparse, dense = sparse_and_dense(model)
    optimizers = [torch.optim.SparseAdam(sparse, lr=2e-2), torch.optim.Adam(dense, lr=2e-3)]
    loss_fn = nn.BCEWithLogitsLoss()
    batches = [clicks(g) for _ in range(12)]
    for epoch in range(5):
        total = 0.0
        for user, items, country, label in batches:
            loss = loss_fn(model(user, items, country), label)
            for opt in optimizers:
                opt.zero_grad()
            loss.backward()
            for opt in optimizers:
                opt.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(batches):.4f}")
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
