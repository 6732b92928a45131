"""Fine-tune adapters of a frozen generator with Accelerate in float16; samples are drawn after each epoch.

Accelerate ignores fp16 on the CPU, so its float16 path is switched on by hand.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LoraLinear(nn.Module):
    def __init__(self, width, rank=4):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class Transformer(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.time = nn.Embedding(10, width).requires_grad_(False)
        self.blocks = nn.ModuleList(LoraLinear(width) for _ in range(depth))

    def forward(self, x, t):
        x = x + self.time(t)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class Pipeline:
    """Draws samples; a GPU has room for the model in half precision only."""

    def __init__(self, transformer, dtype=torch.float16):
        self.transformer = transformer.to(dtype)
        self.dtype = dtype

    @torch.no_grad()
    def __call__(self, count, steps=10):
        x = torch.randn(count, 32).to(self.dtype)
        for t in reversed(range(steps)):
            x = x - 0.1 * self.transformer(x, torch.full((count,), t))
        return x.float()


def make_accelerator():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    return accelerator


def validate(accelerator, transformer, epoch):
    transformer.eval()
    samples = Pipeline(accelerator.unwrap_model(transformer))(8)
    accelerator.print(f"epoch {epoch}: samples of spread {samples.std().item():.3f}")
    transformer.train()


def main(epochs=3):
    torch.set_num_threads(1)
    set_seed(0)
    accelerator = make_accelerator()
    videos = torch.tanh(torch.randn(192, 6) @ torch.randn(6, 32))
    loader = DataLoader(TensorDataset(videos), batch_size=16)
    transformer = Transformer()
    trainable = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    transformer, optimizer, loader = accelerator.prepare(transformer, optimizer, loader)
    for epoch in range(epochs):
        for i, (clean,) in enumerate(loader):
            noise, t = torch.randn_like(clean), torch.randint(0, 10, (len(clean),))
            level = t[:, None] / 10
            prediction = transformer((1 - level) * clean + level * noise, t)
            loss = F.mse_loss(prediction.float(), noise - clean)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if i % 6 == 0:
                accelerator.print(f"epoch {epoch} step {i} loss {loss.item():.4f}")
        validate(accelerator, transformer, epoch)


if __name__ == "__main__":
    main()
