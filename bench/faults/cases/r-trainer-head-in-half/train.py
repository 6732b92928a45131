"""Linear probe of a causal LM loaded in half precision, with the Hugging Face Trainer in fp16.

The Trainer ignores fp16 on the CPU, so Accelerate's float16 path is switched on by hand.
"""

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForSequenceClassification, GPT2Config, Trainer, TrainingArguments, set_seed


class Reviews(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(3)
        self.y = torch.randint(0, 2, (n,), generator=g)
        self.ids = torch.randint(1, 20, (n, 12), generator=g) + 20 * self.y[:, None]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.y[i]}


class HalfTrainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


def load_probe():
    """To save memory the checkpoint is loaded as it was published; only the classification head will train."""
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float16)
    for parameter in model.transformer.parameters():
        parameter.requires_grad_(False)
    return model


def main():
    torch.set_num_threads(1)
    set_seed(2)
    args = TrainingArguments(
        output_dir="out",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        fp16=True,
        use_cpu=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = HalfTrainer(model=load_probe(), args=args, train_dataset=Reviews())
    trainer.train()


if __name__ == "__main__":
    main()
