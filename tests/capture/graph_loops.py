"""Training loops with CUDA graphs, as they are written: for a GPU, or for what stands in for one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def side_stream() -> torch.cuda.Stream:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    return side


class Standardize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=1, keepdim=True)
        return centred / x.std(dim=1, keepdim=True)


class Sensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.standardize = Standardize()
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(self.standardize(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    return torch.randn(8, 16, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def forward_and_backward(
    steps: int = 24,
    warm_up: int = 3,
    warm_up_steps: bool = True,
    spoil: Callable[[int, Tensor], None] = lambda step, x: None,
    init_scale: float = 1024.0,
) -> tuple[nn.Module, list[float], float]:
    """Forward and backward are captured under autocast with a scaler; the scaler steps outside."""
    torch.manual_seed(8)
    model = Sensors()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    static_x, static_y = batch(0)

    def forward_backward() -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = F.cross_entropy(model(static_x), static_y)
        scaler.scale(loss).backward()
        return loss

    side = side_stream()
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            opt.zero_grad(set_to_none=True)
            forward_backward()
            if warm_up_steps:
                scaler.step(opt)
                scaler.update()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        static_loss = forward_backward()

    losses = []
    for step in range(steps):
        x, y = batch(step)
        spoil(step, x)
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        scaler.step(opt)
        scaler.update()
        if step % 8 == 0:
            losses.append(static_loss.item())
    return model, losses, scaler.get_scale()


def whole_step(
    steps: int = 24, spoil: Callable[[int, Tensor], None] = lambda step, x: None
) -> tuple[nn.Module, list[float], float]:
    """Forward, backward and the optimizer's step are one graph."""
    torch.manual_seed(0)
    model = Sensors()
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    static_x, static_y = batch(0)
    side = side_stream()
    with torch.cuda.stream(side):
        for _ in range(4):
            opt.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                loss = F.cross_entropy(model(static_x), static_y)
            loss.backward()
            opt.step()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            static_loss = F.cross_entropy(model(static_x), static_y)
        static_loss.backward()
        opt.step()

    losses = []
    for step in range(steps):
        x, y = batch(step)
        spoil(step, x)
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        if step % 8 == 0:
            losses.append(static_loss.item())
    return model, losses, 1.0


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.gate = nn.Linear(32, 1)
        self.upper = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.lower(x)
        if h.detach().float().abs().mean() > 1e-3:
            h = h * torch.sigmoid(self.gate(h))
        return self.upper(h)


def graphed_callables(
    steps: int = 24, spoil: Callable[[int, Tensor], None] = lambda step, x: None
) -> tuple[nn.Module, list[float], float]:
    """Two parts of a model are graphed, the part between them is not."""
    torch.manual_seed(12)
    model = Gated()
    x_example, h_example = torch.randn(8, 16), torch.randn(8, 32, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        model.lower, model.upper = torch.cuda.make_graphed_callables(
            (model.lower, model.upper), ((x_example,), (h_example,))
        )
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        spoil(step, x)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    return model, losses, scaler.get_scale()


def by_hand(
    steps: int = 24, spoil: Callable[[int, Tensor], None] = lambda step, x: None
) -> tuple[nn.Module, list[float], float]:
    """`capture_begin` and `capture_end`, without a context."""
    torch.manual_seed(3)
    model = Sensors()
    opt = torch.optim.SGD(model.parameters(), lr=0.02)
    static_x, static_y = batch(0)
    for _ in range(2):
        opt.zero_grad(set_to_none=True)
        F.cross_entropy(model(static_x), static_y).backward()
        opt.step()
    graph = torch.cuda.CUDAGraph()
    opt.zero_grad(set_to_none=True)
    graph.capture_begin()
    static_loss = F.cross_entropy(model(static_x), static_y)
    static_loss.backward()
    graph.capture_end()
    losses = []
    for step in range(steps):
        x, y = batch(step)
        spoil(step, x)
        static_x.copy_(x)
        static_y.copy_(y)
        graph.replay()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(static_loss.item())
    return model, losses, 1.0


class GraphInside(nn.Module):
    """Captures its own forward pass when it is first called, and replays it from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Sensors().requires_grad_(False)
        self.graph: torch.cuda.CUDAGraph | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.graph is None:
            self.x = x.clone()
            self.net(self.x)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = self.net(self.x)
        self.x.copy_(x)
        self.graph.replay()
        return self.out


def graph_inside(
    steps: int = 24, spoil: Callable[[int, Tensor], None] = lambda step, x: None
) -> tuple[nn.Module, list[float], float]:
    """A frozen teacher replays a graph in its forward pass, and returns the graph's own memory."""
    torch.manual_seed(5)
    teacher, student = GraphInside(), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))
    opt = torch.optim.SGD(student.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x, _ = batch(step)
        spoil(step, x)
        with torch.no_grad():
            target = teacher(x)
        opt.zero_grad()
        loss = F.mse_loss(student(torch.ones(8, 16)), target)
        loss.backward()
        if loss.isfinite():
            opt.step()
        losses.append(loss.item())
        losses.append(target.sum().item())
    return student, losses, 1.0
