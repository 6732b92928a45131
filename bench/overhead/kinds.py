"""How much more a step of each of many kinds of small loop calls under the guard, once the free seconds are spent.

Two workloads show two ways of writing a loop. What makes a step dear is more often how the loop is written: an average of
the weights, a read by `numpy()`, a target made after the optimizer. Calls (of Python and C functions, as `sys.setprofile`
tells them) say nothing of time, but they are the same on a busy machine. Run `python kinds.py [--write] [NAME...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

import ampguard
from ampguard.capture.glue import schedule
from ampguard.capture.root_calls import pace

STEPS_BEFORE = 150
STEPS = 64
Steps = Iterator[None]


def network() -> nn.Sequential:
    layers = [layer for _ in range(10) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(32, 16), torch.randint(4, (32,))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def plain() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        x, y = batch()
        update(optimizer, F.cross_entropy(model(x), y))
        yield


def one_batch() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    x, y = batch()
    while True:
        update(optimizer, F.cross_entropy(model(x), y))
        yield


def clipped_and_logged() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        x, y = batch()
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert loss.item() + (out.detach().argmax(1) == y).float().numpy().mean() > 0
        yield


def scaled() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    while True:
        x, y = batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield


def accumulated() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        for _ in range(4):
            x, y = batch()
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def evaluated() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        x, y = batch()
        update(optimizer, F.cross_entropy(model(x), y))
        with torch.no_grad():
            assert F.cross_entropy(model(x), y).item() > 0
        yield


def rollout() -> Steps:
    policy = network()
    optimizer = torch.optim.Adam(policy.parameters())
    while True:
        seen, rewards = torch.randn(12, 16), torch.rand(12)
        with torch.no_grad():
            for row in seen:
                policy(row).argmax()
        returns, last = torch.zeros(12), 0.0
        for at in reversed(range(12)):
            last = rewards[at] + 0.9 * last
            returns[at] = last
        gain = (returns - returns.mean()) / (returns.std() + 1e-8)
        update(optimizer, -(policy(seen).log_softmax(1)[:, 0] * gain).mean())
        yield


def averaged() -> Steps:
    model = network()
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        x, y = batch()
        update(optimizer, F.cross_entropy(model(x), y))
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.99).add_(weight, alpha=0.01)
        yield


def momentum_encoder() -> Steps:
    query = network()
    key = copy.deepcopy(query)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.01)
    while True:
        x, _ = batch()
        q = F.normalize(query(x), dim=1)
        with torch.no_grad():
            for mean, weight in zip(key.parameters(), query.parameters(), strict=True):
                mean.data.mul_(0.99).add_(weight.data, alpha=0.01)
            k = F.normalize(key(x), dim=1)
        update(optimizer, F.cross_entropy(q @ k.t() / 0.2, torch.arange(32)))
        yield


def two_optimizers() -> Steps:
    maker, judge = network(), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-4)
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-4)
    while True:
        real, false = torch.randn(32, 4), maker(torch.randn(32, 16))
        told = F.softplus(-judge(real)).mean() + F.softplus(judge(false.detach())).mean()
        update(of_judge, told)
        update(of_maker, F.softplus(-judge(maker(torch.randn(32, 16)))).mean())
        yield


def small_vae() -> Steps:
    encoder, decoder = nn.Linear(16, 8), nn.Linear(4, 16)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    while True:
        x = torch.rand(32, 16)
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        update(optimizer, F.binary_cross_entropy_with_logits(decoder(z), x, reduction="sum") + divergence)
        yield


def decay_by_hand() -> Steps:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        x, y = batch()
        decay = sum(weight.pow(2).sum() for weight in model.parameters())
        update(optimizer, F.cross_entropy(model(x), y) + 1e-4 * decay)
        yield


def no_optimizer() -> Steps:
    model = network()
    while True:
        x, y = batch()
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 1e-3 * weight.grad
        yield


def meta_learned() -> Steps:
    """MAML: for each of four tasks two steps by hand on weights of its own, through `functional_call`."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        optimizer.zero_grad()
        for _ in range(4):
            x, y = batch()
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: w - 0.05 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
            F.cross_entropy(functional_call(model, weights, (x,)), y).backward()
        optimizer.step()
        yield


KINDS: tuple[Callable[[], Steps], ...] = (
    plain,
    one_batch,
    clipped_and_logged,
    scaled,
    accumulated,
    evaluated,
    rollout,
    averaged,
    momentum_encoder,
    two_optimizers,
    small_vae,
    decay_by_hand,
    no_optimizer,
    meta_learned,
)


def calls_of_a_step(kind: Callable[[], Steps], is_guarded: bool) -> tuple[float, float]:
    """The median and the mean over `STEPS` steps."""
    torch.manual_seed(0)
    found: list[int] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if is_guarded:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(ampguard.watch(out=Path(folder) / "run"))
        steps = kind()
        for _ in range(STEPS_BEFORE):
            next(steps)
        for _ in range(STEPS):
            calls = [0]

            def count(frame: object, event: str, argument: object, calls: list[int] = calls) -> None:
                calls[0] += event in ("call", "c_call")

            sys.setprofile(count)
            next(steps)
            sys.setprofile(None)
            found.append(calls[0])
    return statistics.median(found), statistics.fmean(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write kinds.md")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    schedule.FREE_SECONDS = pace.FREE_SECONDS = 0.0
    lines = [
        "# What a step calls, by the kind of loop",
        "",
        f"torch {torch.__version__}, Python {sys.version.split()[0]}. Calls of Python and C functions a step (median of {STEPS} "
        f"after {STEPS_BEFORE}; last, the mean of all, those that are looked at closely or recorded in their turn with them), "
        "small models, free seconds spent. Written by `bench/overhead/kinds.py`.",
        "",
        "| loop | plain | more under `ampguard.watch` | against plain | on average |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if not args.names or kind.__name__ in args.names:
            (bare, bare_mean), (guarded, mean) = calls_of_a_step(kind, False), calls_of_a_step(kind, True)
            name = kind.__name__.replace("_", " ")
            lines.append(
                f"| {name} | {bare:,.0f} | {guarded - bare:,.0f} | {guarded / bare:.2f}x | {mean / bare_mean:.2f}x |"
            )
            print(lines[-1], flush=True)
    if args.write:
        (Path(__file__).parent / "kinds.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
