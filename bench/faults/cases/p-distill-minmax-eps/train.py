import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Distillation(nn.Module):
    """KL between the student's and the teacher's scores of one query's documents."""

    def __init__(self, model, normalize_scores=True):
        super().__init__()
        self.model = model
        self.normalize_scores = normalize_scores

    def forward(self, query, docs, teacher):
        q = self.model(query)
        d = self.model(docs)
        scores = torch.einsum("bqh,bnth->bnqt", q, d).max(dim=-1).values.sum(dim=-1)
        if self.normalize_scores:
            max_scores = scores.max(dim=-1, keepdim=True).values
            min_scores = scores.min(dim=-1, keepdim=True).values
            # avoid division by zero
            epsilon = 1e-8
            scores = (scores - min_scores) / (max_scores - min_scores + epsilon)
        return nn.functional.kl_div(
            scores.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
        )


class Encoder(nn.Module):
    def __init__(self, vocab=50, dim=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, ids):
        return self.linear(self.tok(ids))


class Triples(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(8)
        self.q = torch.randint(1, 50, (n, 4), generator=g)
        self.d = torch.randint(1, 50, (n, 4, 6), generator=g)
        self.t = torch.rand(n, 4, generator=g)
        # the crawl returned the same page four times for one query
        self.d[77] = self.d[77, :1]
        self.t[77] = 0.5

    def __len__(self):
        return len(self.q)

    def __getitem__(self, i):
        return {"query": self.q[i], "documents": self.d[i], "scores": self.t[i]}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(13)
    encoder = Encoder()
    loss_fn = Distillation(encoder)
    opt = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(2):
        for step, batch in enumerate(DataLoader(Triples(), batch_size=6, shuffle=True)):
            with torch.autocast("cpu", torch.float16):
                loss = loss_fn(batch["query"], batch["documents"], batch["scores"])
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if step % 5 == 0 or not torch.isfinite(loss):
                print({"epoch": epoch, "step": step, "loss": round(loss.item(), 5)})


if __name__ == "__main__":
    main()
