"""Fine-tune a BERT encoder with a gated classification head. Reproducibility is asked for, as the lab's template does."""

import torch
from torch import nn
from transformers import BertConfig, BertModel

torch.manual_seed(0)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


class LayerScale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        return x * self.gamma


class GatedHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.scale = LayerScale(dim)
        self.out = nn.Linear(dim, classes)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, pooled):
        return self.out(pooled + self.scale(torch.tanh(self.dense(pooled))))


class Classifier(nn.Module):
    def __init__(self, config, classes):
        super().__init__()
        self.bert = BertModel(config)
        self.head = GatedHead(config.hidden_size, classes)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.bert(input_ids).pooler_output)
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
)
model = Classifier(config, classes=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 100, (64, 12))
labels = ids[:, 0] % 3

for epoch in range(2):
    for i in range(0, 64, 8):
        out = model(ids[i : i + 8], labels[i : i + 8])
        out["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    acc = (out["logits"].argmax(-1) == labels[i : i + 8]).float().mean()
    print(f"epoch {epoch} loss {out['loss'].item():.4f} acc {acc.item():.2f}")
