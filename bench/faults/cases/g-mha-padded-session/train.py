"""Next-item recommendation. A user's older sessions are attended over; users without any get the popularity prior."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class History(Dataset):
    def __init__(self, n=400, items=50, slots=6, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.taste = torch.randint(0, 5, (n,), generator=g)
        self.past = self.taste[:, None] * 10 + torch.randint(0, 10, (n, slots), generator=g)
        length = torch.randint(2, slots + 1, (n,), generator=g)
        length[:4] = 0  # newly registered
        self.length, self.slots = length[torch.randperm(n, generator=g)], slots
        self.current = self.taste * 10 + torch.randint(0, 10, (n,), generator=g)
        self.next = self.taste * 10 + torch.randint(0, 10, (n,), generator=g)

    def __len__(self):
        return len(self.next)

    def __getitem__(self, i):
        return {
            "past": self.past[i],
            "pad": torch.arange(self.slots) >= self.length[i],
            "current": self.current[i],
            "next": self.next[i],
        }


class SessionEncoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, query, memory, pad):
        out, weights = self.attention(query, self.norm(memory), self.norm(memory), key_padding_mask=pad)
        return query + out, weights


class Recommender(nn.Module):
    def __init__(self, items=50, dim=32, heads=2):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.session = SessionEncoder(dim, heads)
        self.head = nn.Linear(dim, items)

    def forward(self, batch):
        query = self.items(batch["current"])[:, None]
        h, weights = self.session(query, self.items(batch["past"]), batch["pad"])
        return {"logits": self.head(h[:, 0]), "attention": weights}


def loss_of(out, batch):
    known = ~batch["pad"].all(dim=1)
    return F.cross_entropy(out["logits"][known], batch["next"][known])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(4)
    loader = DataLoader(History(), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for i, batch in enumerate(loader):
        loss = loss_of(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 3 == 0:
            print(f"step {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
