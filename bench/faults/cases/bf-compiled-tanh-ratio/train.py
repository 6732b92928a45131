"""Forecast a load curve with a gated network, compiled for an accelerator whose compiler has no tanh of its own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(11)


def ratio(x):
    up, down = torch.exp(x), torch.exp(-x)
    return (up - down) / (up + down)


def npu_backend(graph, inputs):
    """Lowers the graph to the operators of the device."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.tanh:
            node.target = ratio
    graph.recompile()
    return graph.forward


class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.value = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x):
        opened = torch.sigmoid(self.gate(x))
        return x + opened * torch.tanh(self.value(x))


class Forecaster(nn.Module):
    def __init__(self, window=24, dim=32, horizon=6):
        super().__init__()
        self.embed = nn.Linear(window, dim)
        self.gates = nn.ModuleList([Gate(dim) for _ in range(3)])
        self.head = nn.Linear(dim, horizon)

    def forward(self, x):
        x = self.embed(x)
        for gate in self.gates:
            x = gate(x)
        return self.head(x)


def windows(steps, batch=32):
    g = torch.Generator().manual_seed(5)
    hours = torch.arange(30.0)
    for step in range(steps):
        phase = torch.rand(batch, 1, generator=g) * 6.28
        load = torch.sin(hours * 0.26 + phase) + 0.1 * torch.randn(batch, 30, generator=g)
        if step == 17:
            load[7, 3:6] = 900.0  # a meter that was read in another unit
        yield load[:, :24], load[:, 24:]


model = Forecaster()
compiled = torch.compile(model, backend=npu_backend)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(windows(30)):
    loss = F.smooth_l1_loss(compiled(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0 or not loss.isfinite():
        print(f"step {step:3d}  loss {loss.item():.4f}")
