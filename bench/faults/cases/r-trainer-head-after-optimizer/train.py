"""Transfer an encoder from two-way to five-way topic labels with the Hugging Face Trainer (bf16), own optimizer."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


class Topics(Dataset):
    def __init__(self, n=320, topics=5):
        g = torch.Generator().manual_seed(0)
        self.labels = torch.randint(0, topics, (n,), generator=g)
        self.ids = torch.randint(0, 12, (n, 10), generator=g) + 2 + 12 * self.labels[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def layerwise_groups(model, lr, decay):
    """Lower layers learn more slowly, the head at the full rate."""
    depth = model.config.num_hidden_layers
    yield {"params": model.bert.embeddings.parameters(), "lr": lr * decay ** (depth + 1)}
    for i, layer in enumerate(model.bert.encoder.layer):
        yield {"params": layer.parameters(), "lr": lr * decay ** (depth - i)}
    yield {"params": model.bert.pooler.parameters(), "lr": lr}
    yield {"params": model.classifier.parameters(), "lr": lr}


def pretrained(classes=2):
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=classes,
    )
    return BertForSequenceClassification(config)


def main():
    torch.set_num_threads(1)
    set_seed(6)
    model = pretrained()
    optimizer = torch.optim.AdamW(layerwise_groups(model, 2e-3, 0.8), weight_decay=0.01)

    # the new task has five topics
    model.classifier = nn.Linear(model.config.hidden_size, 5)
    model.num_labels = model.config.num_labels = 5

    args = TrainingArguments(
        output_dir="out",
        max_steps=40,
        per_device_train_batch_size=8,
        bf16=True,
        use_cpu=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Topics(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)),
    )
    trainer.train()


if __name__ == "__main__":
    main()
