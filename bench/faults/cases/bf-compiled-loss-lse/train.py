"""Energy-based classifier of the bundled digits; the loss is compiled ahead of time with a short decomposition table."""

import torch
import torch.nn as nn
from functorch.compile import make_boxed_func
from sklearn.datasets import load_digits
from torch._dynamo.backends.common import aot_autograd

torch.set_num_threads(1)
torch.manual_seed(1)


def logsumexp(x, dim, keepdim=False):
    return x.exp().sum(dim, keepdim).log()


def emit(graph, inputs):
    return make_boxed_func(graph.forward)


edge = aot_autograd(fw_compiler=emit, bw_compiler=emit, decompositions={torch.ops.aten.logsumexp.default: logsumexp})


@torch.compile(backend=edge)
def energy_loss(logits, target):
    energy = -torch.logsumexp(logits, dim=-1)
    right = logits.gather(1, target[:, None]).squeeze(1)
    return -(right + energy).mean() + 1e-4 * energy.square().mean()


data = load_digits()
images = torch.tensor(data.data, dtype=torch.float32)
labels = torch.tensor(data.target)
model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(32):
    rows = torch.randint(0, len(images), (64,))
    x = images[rows] / 16.0
    if step >= 22:
        x = x * 400.0  # the second half of the files was never normalised
    optimizer.zero_grad()
    loss = energy_loss(model(x), labels[rows])
    loss.backward()
    optimizer.step()
    if step % 4 == 0 or not loss.isfinite():
        print(f"step {step:3d}  loss {loss.item():.4f}")
