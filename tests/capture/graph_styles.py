"""Healthy loops with CUDA graphs, in many styles. Each returns what it has trained."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from graph_loops import Sensors, batch, side_stream
from torch import Tensor, nn


class Loop:
    """A model, its optimizer, its static inputs, and what one pass of it does."""

    def __init__(self, momentum: float = 0.0, scale: float | None = 256.0, share: float = 1.0) -> None:
        torch.manual_seed(1)
        self.model = Sensors()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=momentum)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        self.x, self.y = batch(0)
        self.share = share

    def feed(self, step: int) -> None:
        x, y = batch(step)
        self.x.copy_(x)
        self.y.copy_(y)

    def differentiate(self) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = F.cross_entropy(self.model(self.x), self.y) * self.share
        self.scaler.scale(loss).backward()
        return loss

    def update(self) -> None:
        self.scaler.step(self.opt)
        self.scaler.update()

    def warm_up(self, step: Callable[[], None]) -> None:
        with torch.cuda.stream(side_stream()):
            for _ in range(3):
                step()


def clipped_and_scheduled(steps: int) -> nn.Module:
    loop = Loop()
    schedule = torch.optim.lr_scheduler.StepLR(loop.opt, 5)

    def clip_and_update() -> None:
        loop.scaler.unscale_(loop.opt)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.update()

    def step() -> None:
        loop.opt.zero_grad(set_to_none=True)
        loop.differentiate()
        clip_and_update()

    loop.warm_up(step)
    graph = torch.cuda.CUDAGraph()
    loop.opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loop.differentiate()
    for i in range(steps):
        loop.feed(i)
        graph.replay()
        before = loop.scaler.get_scale()
        clip_and_update()
        if loop.scaler.get_scale() >= before:
            schedule.step()
    return loop.model


def accumulated(steps: int) -> nn.Module:
    """Gradients are zeroed in place, and four replays add to them."""
    loop = Loop(share=0.25)

    def step() -> None:
        loop.opt.zero_grad(set_to_none=False)
        for _ in range(4):
            loop.differentiate()
        loop.update()

    loop.warm_up(step)
    graph = torch.cuda.CUDAGraph()
    loop.opt.zero_grad(set_to_none=False)
    with torch.cuda.graph(graph):
        loop.differentiate()
    for i in range(steps):
        loop.opt.zero_grad(set_to_none=False)
        for part in range(4):
            loop.feed(4 * i + part)
            graph.replay()
        loop.update()
    return loop.model


def cleared_in_the_graph(steps: int) -> nn.Module:
    loop = Loop(scale=None)

    def pass_() -> Tensor:
        loop.opt.zero_grad(set_to_none=False)
        return loop.differentiate()

    def step() -> None:
        pass_()
        loop.opt.step()

    loop.warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = pass_()
    for i in range(steps):
        loop.feed(i)
        graph.replay()
        loop.opt.step()
        if i % 10 == 0:
            loss.item()
    return loop.model


def two_graphs_two_optimizers(steps: int) -> nn.Module:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
    critic = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    of_maker, of_critic = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (maker, critic))
    z, x = torch.randn(8, 4), batch(0)[0]

    def criticise() -> Tensor:
        loss = (F.softplus(-critic(x)) + F.softplus(critic(maker(z).detach()))).mean()
        loss.backward()
        return loss

    def make() -> Tensor:
        loss = F.softplus(-critic(maker(z))).mean()
        loss.backward()
        return loss

    with torch.cuda.stream(side_stream()):
        for _ in range(3):
            for optimizer, pass_ in ((of_critic, criticise), (of_maker, make)):
                optimizer.zero_grad(set_to_none=True)
                pass_()
                optimizer.step()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    of_critic.zero_grad(set_to_none=True)
    with torch.cuda.graph(first):
        loss = criticise()
    of_maker.zero_grad(set_to_none=True)
    with torch.cuda.graph(second, pool=first.pool()):
        make()
    for i in range(steps):
        x.copy_(batch(i)[0])
        for optimizer, graph in ((of_critic, first), (of_maker, second)):
            z.normal_()
            optimizer.zero_grad(set_to_none=False)
            graph.replay()
            optimizer.step()
        if i % 7 == 0:
            loss.item()
    return nn.ModuleList([maker, critic])


def averaged_and_evaluated(steps: int) -> nn.Module:
    """The whole step is one graph, the averaged model's evaluation another, the model's own runs eagerly."""
    loop = Loop(momentum=0.9, scale=None)
    average = copy.deepcopy(loop.model)

    def step() -> None:
        loop.opt.zero_grad(set_to_none=True)
        loop.differentiate()
        loop.opt.step()

    loop.warm_up(step)
    training, evaluation = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    loop.opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(training):
        loop.differentiate()
        loop.opt.step()
    with torch.no_grad(), torch.cuda.graph(evaluation):
        scores = average(loop.x)
    for i in range(steps):
        loop.feed(i)
        training.replay()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), loop.model.parameters(), strict=True):
                mean.lerp_(parameter, 0.05)
        if i % 5 == 0:
            evaluation.replay()
            (scores.argmax(1) == loop.y).float().mean().item()
            loop.model.eval()
            with torch.no_grad():
                loop.model(loop.x).argmax(1).sum().item()
            loop.model.train()
    return nn.ModuleList([loop.model, average])


def some_steps_without_the_graph(steps: int) -> nn.Module:
    loop = Loop()

    def step() -> None:
        loop.opt.zero_grad(set_to_none=True)
        loop.differentiate()
        loop.update()

    loop.warm_up(step)
    graph = torch.cuda.CUDAGraph()
    loop.opt.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loop.differentiate()
    for i in range(steps):
        loop.feed(i)
        loop.opt.zero_grad(set_to_none=False)
        if i % 3 == 2:
            loop.differentiate()
        else:
            graph.replay()
        loop.update()
    return loop.model


def updated_by_hand(steps: int) -> nn.Module:
    torch.manual_seed(1)
    model, (x, y) = Sensors(), batch(0)
    parameters = list(model.parameters())

    def step() -> None:
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.01 * gradient

    with torch.cuda.stream(side_stream()):
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(steps):
        for static, new in zip((x, y), batch(i), strict=True):
            static.copy_(new)
        graph.replay()
    return model


def frozen_features(steps: int) -> nn.Module:
    torch.manual_seed(1)
    backbone, head, (x, y) = Sensors().requires_grad_(False), nn.Linear(5, 5), batch(0)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)
    graph = torch.cuda.CUDAGraph()
    backbone(x)
    with torch.cuda.graph(graph):
        features = backbone(x)
    for i in range(steps):
        for static, new in zip((x, y), batch(i), strict=True):
            static.copy_(new)
        graph.replay()
        opt.zero_grad()
        F.cross_entropy(head(features), y).backward()
        opt.step()
    return head


STYLES = [
    (clipped_and_scheduled, 3),
    (accumulated, 3),
    (cleared_in_the_graph, 3),
    (two_graphs_two_optimizers, 3),
    (averaged_and_evaluated, 3),
    (some_steps_without_the_graph, 3),
    (updated_by_hand, 3),
    (frozen_features, 0),
]
"""Each with the steps of its warm-up."""
