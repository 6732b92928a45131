"""Hugging Face Trainer in bf16 with evaluation, checkpoints, the best model loaded at the end, and a resume."""

import logging
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

logging.getLogger("transformers").setLevel(logging.ERROR)


class Tags(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 48, (n, 12), generator=g)
        lengths = torch.randint(4, 13, (n,), generator=g)
        self.mask = (torch.arange(12)[None] < lengths[:, None]).long()
        self.ids *= self.mask
        self.tags = torch.where(self.mask.bool(), self.ids % 4, -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.tags[i]}


def make_trainer(folder, steps):
    config = BertConfig(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=4,
    )
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=4,
        bf16=True,
        use_cpu=True,
        logging_steps=6,
        eval_strategy="steps",
        eval_steps=12,
        save_strategy="steps",
        save_steps=12,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(
        model=BertForTokenClassification(config), args=args, train_dataset=Tags(240, 0), eval_dataset=Tags(48, 1)
    )


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        set_seed(4)
        make_trainer(folder, 12).train()
        set_seed(4)
        trainer = make_trainer(folder, 36)
        trainer.train(resume_from_checkpoint=True)
        print("best", trainer.state.best_model_checkpoint.split("-")[-1], trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
