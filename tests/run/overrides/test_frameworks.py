"""Real scripts of real frameworks: overridden from a shell they give the very losses of their own setting."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import warm

SOURCES = Path(__file__).parents[3] / "src"

LIGHTNING = """
import logging, warnings
warnings.filterwarnings("ignore")
import torch
from torch import nn
import lightning.pytorch as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses = []
    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

def train(setting):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    model = Lit()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    precision = {"none": "32", "bf16": "bf16-mixed"}[setting]
    L.Trainer(max_epochs=1, precision=precision, accelerator="cpu", gradient_clip_val=1.0, **quiet).fit(
        model, torch.utils.data.DataLoader(data, 8))
    return model.losses
"""

ACCELERATE = """
import torch
from torch import nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState

def train(setting):
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision={"none": "no"}.get(setting, setting), gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8), torch.randint(0, 4, (32,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 8))
    losses = []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses
"""

TRANSFORMERS = """
import os, warnings
warnings.filterwarnings("ignore")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import torch
from accelerate.state import AcceleratorState
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

def train(setting):
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)
    model = BertForSequenceClassification(config)
    data = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 2)} for i in range(32)]
    args = TrainingArguments("out-" + setting, per_device_train_batch_size=8, num_train_epochs=1, logging_steps=1,
                             report_to=[], save_strategy="no", use_cpu=True, bf16=setting == "bf16",
                             disable_tqdm=True, log_level="error")
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    history = trainer.state.log_history
    return [h["loss"] for h in history if "loss" in h] + [h["grad_norm"] for h in history if "grad_norm" in h]
"""

MAIN = """
for setting in ("none", "bf16"):
    print("losses", *train(setting))
"""

CASES = [
    ("lightning", LIGHTNING, "bf16"),
    ("lightning", LIGHTNING, "fp16"),
    ("accelerate", ACCELERATE, "fp32"),
    ("transformers", TRANSFORMERS, "bf16"),
    ("accelerate", ACCELERATE, "O2"),
]
"""Each run takes some seconds to import its framework: the others of the nine were the same when they were tried."""


def python(folder: Path, script: str, *options: str) -> list[str]:
    (folder / "train.py").write_text(script + MAIN)
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    done = warm.run([sys.executable, *options, "train.py"], cwd=folder, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("losses ")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What a script prints without a guard; each is run once."""
    return functools.cache(lambda script: python(tmp_path_factory.mktemp("plain"), script))


@pytest.mark.parametrize(("framework", "script", "wanted"), CASES)
def test_every_setting_becomes_the_one_wanted(
    plain: Callable[[str], list[str]], tmp_path: Path, framework: str, script: str, wanted: str
) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    float32, bf16 = plain(script)
    assert float32 != bf16
    one, other = python(tmp_path, script, "-m", "ampguard", "run", "--precision", wanted)
    assert one == other
    known = {"fp32": float32, "bf16": bf16}
    if wanted in known:
        assert one == known[wanted]
    else:  # none of them trains in float16 on a CPU by itself
        assert one not in (float32, bf16)
        losses = [[float(x) for x in line.split()[1:]] for line in (one, float32)]
        assert losses[0] == pytest.approx(losses[1], rel=0.05)
