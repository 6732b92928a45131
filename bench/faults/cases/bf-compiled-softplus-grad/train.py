"""Fit event rates with softplus intensities; compiled ahead of time with the team's own table of decompositions."""

import torch
import torch.nn as nn
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

torch.set_num_threads(1)
torch.manual_seed(2)
aten = torch.ops.aten


def softplus_backward(grad, x, beta, threshold):
    z = torch.exp(x * beta)
    return grad * z / (z + 1.0)


def as_it_is(graph, inputs):
    return make_boxed_func(graph.forward)


ahead_of_time = aot_autograd(
    fw_compiler=as_it_is,
    bw_compiler=as_it_is,
    decompositions={aten.softplus_backward.default: softplus_backward},
)


class Intensity(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.drive = nn.Linear(dim, dim)

    def forward(self, x):
        drive = self.drive(x)
        return nn.functional.softplus(drive)


class Rates(nn.Module):
    def __init__(self, sensors=12, dim=24):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(sensors, dim), nn.Tanh())
        self.skip = nn.Linear(sensors, dim, bias=False)
        self.intensity = Intensity(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(torch.log1p(self.intensity(self.enter(x) + self.skip(x)))).squeeze(-1)


def batches(steps, batch=24, sensors=12):
    g = torch.Generator().manual_seed(8)
    for step in range(steps):
        x = torch.randn(batch, sensors, generator=g)
        y = x.abs().mean(1)
        if step == 13:
            x[5] *= 1500.0  # a burst
        yield x, y


model = Rates()
compiled = torch.compile(model, backend=ahead_of_time)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(batches(24)):
    optimizer.zero_grad()
    loss = (compiled(x) - y).abs().mean()
    loss.backward()
    optimizer.step()
    if step % 4 == 0 or not loss.isfinite():
        print(f"step {step:3d}  loss {loss.item():.4f}")
