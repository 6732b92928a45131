"""Regress three properties of molecules with the Hugging Face Trainer (bf16). Some properties were never measured."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from transformers.modeling_outputs import ModelOutput

TARGETS = ("gap", "mu", "alpha")


@dataclass
class RegressionOutput(ModelOutput):
    loss: torch.Tensor | None = None
    predictions: torch.Tensor | None = None


class Molecules(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 24, generator=g)
        self.y = torch.stack([self.x[:, :8].sum(1), self.x[:, 8:16].prod(1), self.x.abs().mean(1)], dim=1)
        unmeasured = torch.rand(n, generator=g) < 0.008
        self.y[unmeasured, 1] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"features": self.x[i], "labels": self.y[i]}


class PropertyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.SiLU())
        self.heads = nn.ModuleDict({name: nn.Linear(64, 1) for name in TARGETS})

    def forward(self, features, labels=None):
        h = self.trunk(features)
        predictions = torch.cat([self.heads[name](h) for name in TARGETS], dim=-1).float()
        loss = None
        if labels is not None:
            loss = nn.functional.mse_loss(predictions, labels)
        return RegressionOutput(loss=loss, predictions=predictions)


def main():
    torch.set_num_threads(1)
    set_seed(3)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        bf16=True,
        use_cpu=True,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_nan_inf_filter=False,
    )
    trainer = Trainer(model=PropertyNet(), args=args, train_dataset=Molecules())
    trainer.train()


if __name__ == "__main__":
    main()
