"""Fine-tune a small causal LM on a tool-calling dialect with Accelerate (bf16). Two special tokens are added."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from model import LanguageModel

SPECIAL = ("<call>", "</call>")


class CharTokenizer:
    def __init__(self):
        self.vocab = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz ()=,0123456789")}

    def add_special_tokens(self, tokens):
        for token in tokens:
            self.vocab[token] = len(self.vocab)

    def __len__(self):
        return len(self.vocab)

    def __call__(self, pieces):
        return [self.vocab[p] for piece in pieces for p in ([piece] if piece in SPECIAL else piece)]


def dialogues(tokenizer, n=192):
    rows = []
    for i in range(n):
        name = ["sum", "max", "min"][i % 3]
        rows.append(tokenizer(["use ", SPECIAL[0], f"{name}({i % 10},{i % 7})", SPECIAL[1], f" ={i % 10}"]))
    return [torch.tensor(r) for r in rows]


def main():
    torch.set_num_threads(1)
    set_seed(5)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True, gradient_accumulation_steps=2)
    tokenizer = CharTokenizer()
    model = LanguageModel(len(tokenizer))

    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": no_decay}], lr=3e-3)

    tokenizer.add_special_tokens(SPECIAL)
    model.resize_token_embeddings(len(tokenizer))
    loader = DataLoader(dialogues(tokenizer), batch_size=8, shuffle=True, collate_fn=torch.stack)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    model.train()
    for epoch in range(2):
        for i, input_ids in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(input_ids)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                if accelerator.sync_gradients:
                    model.zero_grad()
            if i % 6 == 0:
                accelerator.print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
