"""Hugging Face Trainer in float16; a callback keeps the best model so far together with what is needed to go on from it.

The Trainer ignores fp16 on the CPU, so Accelerate's float16 path is switched on by hand.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Sensors(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(12)
        self.x = torch.randn(n, 16, generator=g).cumsum(1)
        self.y = (self.x[:, 8] > self.x[:, 3]).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"signal": self.x[i], "labels": self.y[i]}


class SensorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 2)

    def forward(self, signal, labels=None):
        states, _ = self.gru(signal[..., None])
        logits = self.out(states.mean(1))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class KeepBest(TrainerCallback):
    """Every `every` updates: is the logged loss the best so far? Then keep model, optimizer and schedule."""

    def __init__(self, folder, every=15):
        self.folder, self.every, self.best = Path(folder), every, float("inf")

    def on_log(self, args, state, control, logs=None, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        if "loss" not in (logs or {}) or state.global_step % self.every or float(logs["loss"]) >= self.best:
            return
        self.best = float(logs["loss"])
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(),
                "step": state.global_step,
            },
            self.folder / "best.pt",
        )
        print(f"step {state.global_step}: loss {self.best:.4f}, kept")


class HalfTrainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)


def main():
    torch.set_num_threads(1)
    set_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            fp16=True,
            use_cpu=True,
            logging_steps=5,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = HalfTrainer(model=SensorNet(), args=args, train_dataset=Sensors(), callbacks=[KeepBest(folder)])
        trainer.train()


if __name__ == "__main__":
    main()
