"""Distil crowd votes into a small classifier with the Hugging Face Trainer."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Votes(Dataset):
    """Features and the share of annotators who chose each class."""

    def __init__(self, n=512, classes=4, annotators=60):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(n, 20, generator=g)
        w = 0.35 * torch.randn(20, classes, generator=g)
        p = ((self.x @ w) / 2).softmax(-1)
        votes = torch.stack(
            [torch.bincount(torch.multinomial(q, annotators, True, generator=g), minlength=classes) for q in p]
        )
        easy = (votes == 0).any(1)
        keep = torch.cat([torch.nonzero(~easy).flatten(), torch.nonzero(easy).flatten()[:1]])
        self.x, self.share = self.x[keep], votes[keep].float() / annotators

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.share[i]}


class Student(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.LayerNorm(64))
        self.classifier = nn.Linear(64, classes)

    def forward(self, x, labels=None):
        logits = self.classifier(self.body(x))
        if labels is None:
            return {"logits": logits}
        log_q = torch.log_softmax(logits.float(), dim=-1)
        kl = labels * (labels.log() - log_q)
        return {"loss": kl.sum(-1).mean(), "logits": logits}


def main():
    torch.set_num_threads(1)
    set_seed(9)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        bf16=True,
        use_cpu=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=Student(), args=args, train_dataset=Votes())
    trainer.train()


if __name__ == "__main__":
    main()
