import math
import random

import torch
from torch import nn

PAD = 0


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, extended_attention_mask):
        def heads(t):
            return t.view(t.shape[0], t.shape[1], self.h, -1).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        attention_scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        attention_scores = attention_scores + extended_attention_mask
        probs = nn.functional.softmax(attention_scores, dim=-1)
        return torch.matmul(probs, v).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.attention = SelfAttention(d, h)
        self.output = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x, m):
        return self.norm(x + self.output(self.attention(x, m)))


class Bert(nn.Module):
    def __init__(self, vocab=100, d=32, h=2, layers=2):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, d, padding_idx=PAD)
        self.proj = nn.Linear(d, d)
        self.encoder = nn.ModuleList(Layer(d, h) for _ in range(layers))
        self.pooler = nn.Linear(d, 2)

    def forward(self, input_ids):
        attention_mask = input_ids.ne(PAD)
        x = self.proj(self.embeddings(input_ids))
        extended_attention_mask = attention_mask[:, None, None, :].to(x.dtype)
        extended_attention_mask = (1.0 - extended_attention_mask) * -1e9
        for layer in self.encoder:
            x = layer(x, extended_attention_mask)
        m = attention_mask.unsqueeze(-1)
        pooled = (x * m).sum(1) / m.sum(1).clamp(min=1)
        return self.pooler(pooled)


def make_reviews(n):
    rows = []
    for i in range(n):
        label = random.randint(0, 1)
        length = random.randint(3, 10)
        words = [random.randint(1, 49) + 50 * label for _ in range(length)]
        rows.append((words, label))
    rows[n // 2] = ([], 0)  # a review that holds nothing but an emoji the tokenizer drops
    return rows


def collate(rows):
    width = max(max(len(w) for w, _ in rows), 1)
    ids = torch.tensor([w + [PAD] * (width - len(w)) for w, _ in rows])
    return ids, torch.tensor([y for _, y in rows])


def main():
    torch.set_num_threads(1)
    random.seed(9)
    torch.manual_seed(9)
    loader = torch.utils.data.DataLoader(make_reviews(160), batch_size=8, shuffle=True, collate_fn=collate)
    model = Bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
    for epoch in range(2):
        total = 0.0
        for ids, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(ids), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        print(f"epoch {epoch} mean loss {total / len(loader):.4f}")


if __name__ == "__main__":
    main()
