"""Token tagging with Accelerate (bf16): gradient accumulation, clipping, a masked loss in which a sentence may carry no tag."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self, vocab=60, dim=32, tags=5):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classify = nn.Linear(dim, tags)

    def forward(self, ids):
        states = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        pooled = states.masked_fill((ids == 0)[..., None], float("-inf")).amax(1, keepdim=True)
        return self.classify(states + pooled)


def tagging_loss(logits, tags):
    per_token = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="none"
    )
    return per_token.sum() / (tags != -100).sum().clamp(min=1)


def main():
    torch.set_num_threads(1)
    set_seed(4)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    ids = torch.randint(1, 60, (240, 10))
    lengths = torch.randint(2, 11, (240,))
    ids[torch.arange(10)[None] >= lengths[:, None]] = 0
    tags = torch.where(ids == 0, -100, ids % 5)
    tags[::6] = -100
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    loader = DataLoader(TensorDataset(ids, tags), batch_size=6, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for i, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = tagging_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if i % 8 == 0:
            accelerator.print(f"{i:3d} loss {loss.item():.4f}")
    print("last", loss.item())


if __name__ == "__main__":
    main()
