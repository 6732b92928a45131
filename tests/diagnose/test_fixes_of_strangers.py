"""Fixes and sentences for what scripts of strangers failed with: second derivatives, lattices, determinants, empty losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fix_texts import promised, run, script
from torch import Tensor, nn

Guard = Callable[..., Any]


# --- backward ---------------------------------------------------------------------------------------------------------


class Radial(nn.Module):
    """A field of the distance to a point, as in networks for differential equations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, xy: Tensor) -> Tensor:
        r = torch.sqrt(xy[:, :1] ** 2 + xy[:, 1:] ** 2)
        return self.body(torch.cat([xy, r], 1))


def test_second_derivative_of_a_root_names_the_root(guard: Guard) -> None:
    """What is differentiated twice is the root, not the quotient that its first derivative is made of."""

    def body() -> None:
        torch.manual_seed(0)
        net = Radial()
        for step in range(3):
            xy = torch.rand(6, 2)
            if step == 2:
                xy[3] = 0.0
            xy.requires_grad_()
            (g,) = torch.autograd.grad(net(xy).sum(), xy, create_graph=True)
            lap = sum(torch.autograd.grad(g[:, i].sum(), xy, create_graph=True)[0][:, i] for i in range(2))
            assert isinstance(lap, Tensor)
            lap.square().mean().backward()

    first = guard(body).first
    assert (first.step, first.cause) == (2, "singular-gradient")
    assert "derivative of sqrt at 0" in first.explanation
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("add-epsilon", True)
    assert "torch.sqrt(xy[:, :1] ** 2 + xy[:, 1:] ** 2 + 1e-6)" in fix.how


def test_lattice_of_infinities_gets_finite_ones(guard: Guard) -> None:
    """logaddexp of two -Inf is -Inf, and its derivative NaN: a large finite number cures it, an epsilon does not."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 6)
        emissions = net(torch.randn(8, 4)).log_softmax(-1)
        alpha = torch.cat([emissions[0, :1], torch.full((5,), -math.inf)])
        for row in emissions[1:]:
            moved = torch.cat([torch.full((1,), -math.inf), alpha[:-1]])
            alpha = torch.logaddexp(alpha, moved) + row
        (-alpha[-1]).backward()

    first = guard(body).first
    assert first.cause == "singular-gradient"
    assert "makes it from -Inf and -Inf" in first.explanation
    (fix,) = first.fixes
    assert (fix.action, fix.verified) == ("mask-value", True)
    assert "torch.logaddexp(alpha.clamp(min=-1e30), moved.clamp(min=-1e30))" in fix.how


@pytest.mark.parametrize(
    ("made", "function", "term"),
    [
        ("torch.eye(3)", "torch.linalg.eigh(c)[1]", "torch.diag(torch.arange(3))"),
        ("torch.eye(3)", "torch.linalg.svd(c)[0]", "torch.diag(torch.arange(3))"),
        ("torch.eye(3, 4)", "torch.linalg.svd(c, full_matrices=False)[2]", "torch.arange(4) * torch.eye(3, 4)"),
    ],
)
def test_eigenvalues_are_kept_apart_by_what_is_printed(
    made: str, function: str, term: str, guard: Guard, tmp_path: Path
) -> None:
    line = f"c = {made} * 4 + 0 * h.sum(); r = {function}.abs() * (1 + torch.arange({made[-2]}))"
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "singular-gradient"
    fix = first.fixes[0]
    changed = line.replace("(c", f"(c + 0.0001 * {term}")
    assert fix.verified
    assert fix.how == changed.split("; ")[1]
    namespace: dict[str, Any] = {}
    exec(script(changed, "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_columns_are_kept_independent_by_what_is_printed(guard: Guard, tmp_path: Path) -> None:
    """One number on the whole diagonal: with 0, 1, 2 ... there a first column of zeros would stay one."""
    line = (
        "c = torch.eye(4, 3).roll(1, 1) * torch.tensor([0.0, 1.0, 1.0]) + 0 * h.sum(); r = torch.linalg.qr(c)[0].abs()"
    )
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "singular-gradient"
    fix = first.fixes[0]
    changed = line.replace("qr(c", "qr(c + 0.0001 * torch.eye(4, 3)")
    assert fix.verified
    assert fix.how == changed.split("; ")[1]
    namespace: dict[str, Any] = {}
    exec(script(changed, "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_one_of_two_divisions_in_a_hook(guard: Guard) -> None:
    """The hook runs for each of three calls: the divisor is told apart by its turn in each."""

    def equal_lengths(g: Tensor) -> Tensor:
        return g / g.norm(dim=1, keepdim=True) / g.shape[0]

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        anchor, near, far = (net(torch.randn(5, 4)) for _ in range(3))
        for z in (anchor, near, far):
            z.register_hook(equal_lengths)
        gap = (anchor - near).square().sum(1) - (anchor - far).square().sum(1)
        torch.relu(gap).mean().backward()

    first = guard(body).first
    assert first.cause == "singular-gradient"
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("add-epsilon", True)
    assert fix.how == "return g / (g.norm(dim=1, keepdim=True) + 1e-6) / g.shape[0]"


def test_the_mass_of_an_interval_has_no_logsigmoid(guard: Guard) -> None:
    """log(sigmoid(a) - sigmoid(b)) is no log(1 - sigmoid(x)): a fix that changes what is learnt is none."""

    def body() -> None:
        torch.manual_seed(0)
        x = nn.Linear(4, 6)(torch.randn(8, 4)) + torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 40.0])
        mass = torch.sigmoid(x + 0.1) - torch.sigmoid(x - 0.1)
        torch.where(mass > 1e-5, torch.log(mass), -x).mean().neg().backward()

    first = guard(body).first
    assert first.cause == "singular-gradient"
    assert {fix.action for fix in first.fixes} == {"add-epsilon", "clamp"}
    assert all(fix.verified for fix in first.fixes)


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch.linalg.slogdet(w)[1]", "torch.slogdet(w)[1]", "torch.logdet(w)"])
def test_singular_matrix_has_no_logarithm_of_its_determinant(name: str, guard: Guard, tmp_path: Path) -> None:
    line = f"w = torch.diag(torch.tensor([1.0, 2.0, 0.0])) + 0 * h[:3]; r = h - {name}"
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert (first.cause, first.op) == ("domain-error", "aten._linalg_slogdet.default")
    assert "3x3 matrix that is singular (1 row of it is all 0)" in first.explanation
    fix = first.fixes[0]
    assert fix.verified
    assert fix.how == f"r = h - {name.replace('(w)', '(w + 1e-6 * torch.eye(3))')}"


def test_log_softmax_by_logsumexp_with_an_empty_row(guard: Guard) -> None:
    """As `torch.distributions.Categorical` normalises its logits."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        legal = torch.tensor([[True, True, False], [False, False, False]])
        logits = net(torch.randn(2, 4)).masked_fill(~legal, -math.inf)
        dist = torch.distributions.Categorical(logits=logits, validate_args=False)
        dist.log_prob(torch.tensor([0, 0])).mean().backward()

    first = guard(body).first
    assert first.cause == "masked-softmax"
    assert "1 of 2 rows" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("fix-mask", True), ("mask-value", True)]
    assert "masked_fill((masked := ~legal)" in first.fixes[0].how  # the line that masks, where the mask is in reach


def test_ratio_of_sums_over_nothing(guard: Guard, tmp_path: Path) -> None:
    """Dice and Tversky over the annotated pixels of an image that has none: no count is divided by."""
    line = "p = h[h > 99]; r = p.sum() / (p.sum() + 0.3 * (1 - p).sum()) + h"
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "empty-reduction"
    assert "by its size" not in first.explanation
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert fix.how.endswith("r = p.sum() / (p.sum() + 0.3 * (1 - p).sum() + 1e-6) + h")


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        (
            "y = torch.full((6,), -100); r = F.cross_entropy(h, y) + h",
            'r = (F.cross_entropy(h, y, reduction="sum") / (y != -100).sum().clamp(min=1)) + h',
        ),
        (
            "y = torch.full((6,), 2); r = F.nll_loss(h, y, ignore_index=2) + h",
            'r = (F.nll_loss(h, y, ignore_index=2, reduction="sum") / (y != 2).sum().clamp(min=1)) + h',
        ),
        (
            "from torch.nn.functional import cross_entropy; y = torch.full((6,), -100); r = cross_entropy(h, y) + h",
            'r = (cross_entropy(h, y, reduction="sum") / (y != -100).sum().clamp(min=1)) + h',
        ),
        ("r = h[:0].mean(0) + h", "r = (h[:0].sum(0) / max(h[:0].shape[0], 1)) + h"),
    ],
)
def test_loss_of_nothing_is_printed_as_code(line: str, changed: str, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "empty-reduction"
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("guard-empty", True)
    assert fix.how.endswith(f": {changed}")
    namespace: dict[str, Any] = {}
    exec(script("; ".join([*line.split("; ")[:-1], changed]), "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_epsilon_of_normalize_is_an_argument(guard: Guard, tmp_path: Path) -> None:
    line = "r = F.normalize(h * 0, dim=1) + h"
    first, _ = run(script(line, "inside", half=True), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "fp16-underflow"
    assert "div of 0 is NaN" in first.explanation
    fix = first.fixes[0]
    assert (fix.action, fix.verified) == ("add-epsilon", True)
    assert fix.how == "r = F.normalize(h * 0, dim=1, eps=0.001) + h"


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_score_of_a_path_that_does_not_exist(guard: Guard) -> None:
    """Viterbi over too few frames: the -Inf that the script began with is its answer."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        with torch.no_grad():
            emissions = net(torch.randn(2, 4)).log_softmax(-1)
            alpha = torch.full((3,), -math.inf)
            alpha[0] = emissions[0, 0]
            moved = torch.cat([torch.full((1,), -math.inf), alpha[:-1]])
            alpha = torch.maximum(alpha, moved) + emissions[1]
            assert alpha[-1].item() == -math.inf

    assert not guard(body).report.incidents


def test_value_that_was_computed_unseen_is_not_meant_to_be_infinite(guard: Guard) -> None:
    """Advantages by a loop over small tensors use up what is taped of a step; the loss after it overflows."""

    def body() -> None:
        torch.manual_seed(0)
        actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=1e-3)
        for step in range(18):
            x, reward = torch.randn(40, 4), torch.rand(40) + 0.5
            done = torch.rand(40) < 0.1
            log_prob = actor(x).log_softmax(-1)[:, 0]
            with torch.no_grad():
                value, advantage, last = critic(x).squeeze(-1), torch.zeros(40), torch.zeros(())
                for t in reversed(range(40)):
                    last = reward[t] - value[t] + 0.9 * 0.95 * (~done[t]) * last
                    advantage[t] = last
            ratio = torch.exp(log_prob + (100.0 if step == 15 else 0.0))
            loss = (ratio * advantage).mean() + (critic(x).squeeze(-1) - reward).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first = guard(body).first
    assert first.step == 15
    assert "meant to have" not in first.explanation


# --- protocol ---------------------------------------------------------------------------------------------------------


def test_advice_on_unused_parameters_freezes_nothing_that_is_trained(guard: Guard) -> None:
    """One branch of a head is trained: what is to be frozen are the others."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.head = nn.ModuleDict({"heat": nn.Linear(4, 2), "box": nn.Linear(4, 4), "reid": nn.Linear(4, 4)})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.body(x)
            return {name: branch(x) for name, branch in self.head.items()}

    def body() -> None:
        torch.manual_seed(0)
        model = Head()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(3, 4))["heat"].square().mean().backward()
            optimizer.step()

    first = guard(body).first
    assert first.cause == "unused-parameters"
    freeze = first.fixes[1].how
    assert "requires_grad_(False) for `head.box`, `head.reid`" in freeze
    assert "`head.box`, `head.reid`" in first.fixes[0].how


def test_average_that_became_a_part_of_the_graph_raises_no_warning(guard: Guard) -> None:
    """A target network that was averaged with gradients on is no leaf any more: reading its `.grad` would warn."""

    def body() -> None:
        torch.manual_seed(0)
        net, target = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(14):
            x = torch.rand(3, 4) + (math.nan if step == 12 else 0.0)
            with torch.no_grad():
                goal = target(x)
            loss = (net(x) - goal).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch._foreach_lerp_(list(target.parameters()), list(net.parameters()), 0.1)

    run = guard(body)
    assert run.faults == 0, run.stderr


# --- precision --------------------------------------------------------------------------------------------------------


def test_sum_of_two_minima_is_cured_by_no_precision(guard: Guard) -> None:
    """Both masks are made of their type's lowest number: in bfloat16 and float32 the sum leaves these as well."""

    def body() -> None:
        torch.manual_seed(0)
        net = nn.Linear(4, 5)
        low = torch.finfo(torch.float16).min
        padding = torch.full((5, 5), low, dtype=torch.float16)
        document = torch.zeros(5, 1, dtype=torch.float16)
        document[2] = low
        with torch.autocast("cpu", dtype=torch.float16):
            weights = (net(torch.randn(5, 4)) + (padding + document)).softmax(-1)
        weights.float().square().sum().backward()

    first = guard(body).first
    assert first.cause == "mask-overflow"
    assert "what was masked already" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("mask-value", True)]


def rescaled(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out / out.amax(1, keepdim=True)


def test_hook_on_a_module_of_pytorch_is_the_scripts_line(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 2))
        net[1].register_forward_hook(rescaled)
        x = torch.randn(3, 4)
        x[1] = 0.0
        net(x).square().mean().backward()

    first = guard(body).first
    assert (first.cause, first.module) == ("division-by-zero", "1")
    fix = first.fixes[0]
    assert (fix.verified, fix.how) == (True, "return out / (out.amax(1, keepdim=True) + 1e-6)")
