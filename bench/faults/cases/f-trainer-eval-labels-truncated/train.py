"""Instruction tuning with the Hugging Face Trainer: the prompt's tokens are not part of the loss."""

import random

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

MAX_LENGTH = 40


class Instructions(Dataset):
    def __init__(self, n, prompt_lengths, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(n):
            prompt = [rng.randrange(3, 120) for _ in range(rng.choice(prompt_lengths))]
            answer = [rng.randrange(3, 120) for _ in range(rng.randint(4, 8))] + [2]
            ids = (prompt + answer)[:MAX_LENGTH]
            labels = ([-100] * len(prompt) + answer)[:MAX_LENGTH]
            self.rows.append((ids, labels))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    }


def main():
    torch.set_num_threads(1)
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    args = TrainingArguments(
        output_dir="out",
        max_steps=20,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        bf16=True,
        use_cpu=True,
        learning_rate=1e-3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        data_collator=collate,
        train_dataset=Instructions(80, [8, 12, 20, 28], seed=1),
        eval_dataset=Instructions(24, [12, 28, 44, 52], seed=2),
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
