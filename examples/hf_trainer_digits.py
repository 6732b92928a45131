"""A small ResNet on scikit-learn's digits with the transformers Trainer: float16 on the CPU.

python examples/hf_trainer_digits.py
python examples/hf_trainer_digits.py --plain               # the Trainer's own: float32 on the CPU under the name of fp16
ampguard run examples/hf_trainer_digits.py --bad 40        # in this step, a batch is too bright for float16
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

from ampguard.integrations.hf import prepare

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--bad", type=int, default=-1, help="the step with a bad batch")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    labels = torch.tensor(digits.target)
    model = ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
        )
    )
    step = 0

    def collate(rows: list[int]) -> dict[str, Tensor]:
        nonlocal step
        pixels = images[rows] * (1e6 if step == args.bad else 1)
        step += 1
        return {"pixel_values": pixels, "labels": labels[rows]}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, fp16=True, per_device_train_batch_size=BATCH, num_train_epochs=args.epochs,
            learning_rate=4e-3, logging_steps=22, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=list(range(1400)), data_collator=collate)
        if not args.plain:
            prepare(trainer)
        trainer.train()

    model.eval()
    with torch.no_grad():
        right = (model(images[1400:]).logits.argmax(1) == labels[1400:]).float().mean()
    scale = trainer.accelerator.scaler.get_scale() if trainer.accelerator.scaler else 1
    print(f"held-out accuracy {right:.1%}, loss scale {scale:g}")


if __name__ == "__main__":
    main()
