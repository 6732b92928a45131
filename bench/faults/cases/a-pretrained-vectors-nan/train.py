import random

import torch
from torch import nn

import vocab

POS = ["good", "great", "fine", "sharp", "funny", "bright"]
NEG = ["bad", "dull", "weak", "slow", "loud", "dark"]
FILL = ["the", "film", "movie", "plot", "actor", "scene", "was", "with", "music", "camera", "ending", "script"]


class Reviews(torch.utils.data.Dataset):
    def __init__(self, voc, n):
        r = random.Random(0)
        self.rows = []
        for i in range(n):
            label = r.randint(0, 1)
            words = r.choices(FILL, k=5) + r.choices(POS if label else NEG, k=2)
            if i == 90:
                words[3] = "soundtrack"  # the first word the vectors do not know
            r.shuffle(words)
            self.rows.append((voc.encode(" ".join(words)), label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids, label = self.rows[i]
        return torch.tensor(ids), torch.tensor(float(label))


class BiGRU(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors, freeze=False)
        self.rnn = nn.GRU(vectors.shape[1], 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, 1)

    def forward(self, ids):
        e = self.words(ids)
        h, _ = self.rnn(e)
        return self.out(h.max(dim=1).values).squeeze(-1)


class Trainer:
    def __init__(self):
        torch.set_num_threads(1)
        torch.manual_seed(1)
        voc = vocab.load()
        self.loader = torch.utils.data.DataLoader(Reviews(voc, 160), batch_size=10)
        self.model = BiGRU(voc.vectors)
        self.criterion = nn.BCEWithLogitsLoss()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=3e-3)

    def fit(self, epochs=1):
        for epoch in range(epochs):
            for i, (ids, y) in enumerate(self.loader):
                self.optimizer.zero_grad()
                loss = self.criterion(self.model(ids), y)
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optimizer.step()
                print(f"{epoch}/{i:03d} bow_loss={loss.item():.4f}")


if __name__ == "__main__":
    Trainer().fit()
