import torch
import torch.nn as nn

from crf import CRF


class Tagger(nn.Module):
    def __init__(self, vocab=60, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.emit = nn.Linear(dim, 3)
        self.crf = CRF()

    def forward(self, ids, allowed):
        h, _ = self.lstm(self.emb(ids))
        return self.crf(self.emit(h), allowed)


def sentences(n, batch=6, length=8):
    g = torch.Generator().manual_seed(4)
    for i in range(n):
        ids = torch.randint(0, 60, (batch, length), generator=g)
        allowed = torch.ones(batch, length, 3, dtype=torch.bool)
        spans = torch.randint(0, length - 2, (batch,), generator=g)
        for b, s in enumerate(spans.tolist()):
            allowed[b, s] = torch.tensor([False, True, False])  # the annotator marked where a name begins
        if i >= 9:
            allowed[2, 0] = torch.tensor([True, False, False])  # from here on also words that are no name
        yield ids, allowed


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tagger = Tagger()
    optimizer = torch.optim.Adam(tagger.parameters(), lr=5e-3)
    for step, (ids, allowed) in enumerate(sentences(13)):
        nll = tagger(ids, allowed)
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
        print(f"step {step}: nll {nll.item():.4f}")


if __name__ == "__main__":
    main()
