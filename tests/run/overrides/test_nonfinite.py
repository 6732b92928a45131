"""`--on-nonfinite skip` and `heal`: a bad step is held off, audibly, never for ever; a verified fix is applied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from override_loops import batches, model, weights
from torch import Tensor, nn

import ampguard
from ampguard.diagnose.budget import Budget
from ampguard.errors import StopRun
from ampguard.run.overrides.patience import IN_A_ROW, WHILE_SCALE_FALLS


def train(bad: set[int], steps: int = 6, leave_out: bool = False, where: str = "loss") -> tuple[nn.Module, int]:
    """(the model, the steps begun) of a loop with NaN in the loss or Inf in a gradient of some steps; `leave_out`: not taken."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    begun = 0
    for step, (x, y) in enumerate(batches(steps)):
        if leave_out and step in bad:
            continue
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        if step in bad and where == "loss":
            loss = loss / 0.0 * 0.0
        begun += 1
        loss.backward()
        if step in bad and where == "gradient":
            net[0].weight.grad[3, 3] = float("inf")
        optimizer.step()
    return net, begun


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("bad", [{0}, {2, 3}, {5}])
def test_bad_steps_are_as_if_they_had_not_been(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str], bad: set[int], where: str
) -> None:
    control, _ = train(bad, leave_out=True)
    with overridden(on_nonfinite="skip") as session:
        net, _ = train(bad, where=where)
    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(control), strict=True))
    assert session.report.run["steps_held_off"] == len(bad)
    assert session.report.steps == 6
    said = capsys.readouterr().err
    assert said.count("held off, ") == 1
    assert f"step {min(bad)}: held off" in said
    assert ("2 steps were held off in all: 2 for" in said) == (len(bad) == 2)


def test_never_for_ever(overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    begun = 0
    with overridden(on_nonfinite="skip") as session:
        _, begun = train(set(range(3, 50)), steps=50)
    assert begun == 0  # it never came to the end
    assert isinstance(session.ended_by, StopRun)
    assert session.ended_by.status == 3
    assert session.report.steps == 3 + IN_A_ROW
    assert "The cause: division-by-zero, first in step 3" in capsys.readouterr().err


def test_a_loss_that_the_loop_throws_away_holds_nothing_off(overridden: Callable[..., Any]) -> None:
    with overridden(on_nonfinite="skip") as session:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        before = weights(net)
        for step, (x, y) in enumerate(batches(2)):
            loss = nn.functional.cross_entropy(net(x), y) * (float("nan") if step == 0 else 1.0)
            loss.backward()
            if step == 0:
                optimizer.zero_grad()
                continue
            optimizer.step()
    assert session.report.run["steps_held_off"] == 0
    assert not torch.equal(before[0], weights(net)[0])


def test_one_bad_loss_of_two_holds_off_one_optimizer(overridden: Callable[..., Any]) -> None:
    """A GAN's two updates: the second has a loss of its own."""
    with overridden(on_nonfinite="skip") as session:
        one, two, (x, _) = model(), model(), batches(1)[0]
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, two)]
        before = weights(one), weights(two)
        for net, optimizer, factor in zip((one, two), optimizers, (float("nan"), 1.0), strict=True):
            optimizer.zero_grad()
            (net(x).square().mean() * factor).backward()
            optimizer.step()
    assert torch.equal(before[0][0], weights(one)[0])
    assert not torch.equal(before[1][0], weights(two)[0])
    assert session.report.run["steps_held_off"] == 1


@pytest.mark.parametrize("bad", [("one",), ("one", "two")])
def test_so_many_in_a_row_are_steps_of_one_optimizer(overridden: Callable[..., Any], bad: tuple[str, ...]) -> None:
    """One optimizer's good steps do not hide that the other never steps; two that are bad do not count twice."""
    with overridden(on_nonfinite="skip") as session:
        nets = {name: model() for name in ("one", "two")}
        optimizers = {name: torch.optim.SGD(net.parameters(), 0.1) for name, net in nets.items()}
        begun = 0
        for x, _ in batches(3 * IN_A_ROW):
            begun += 1
            for name, net in nets.items():
                optimizers[name].zero_grad()
                (net(x).square().mean() * (float("nan") if name in bad else 1.0)).backward()
                optimizers[name].step()
    assert isinstance(session.ended_by, StopRun)
    assert begun == IN_A_ROW


@pytest.mark.parametrize("precision", ["fp16", None])
def test_a_scale_that_falls_for_ever(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str], precision: str | None
) -> None:
    """Gained or the script's own: 16 steps down to a scale of 1, and then no more than the usual patience."""
    with overridden(precision, on_nonfinite="skip") as session:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu") if precision is None else None
        for x, y in batches(60):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            (scaler.scale(loss) if scaler else loss).backward()
            net[0].weight.grad.fill_(float("inf"))
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    assert isinstance(session.ended_by, StopRun)
    assert 16 < session.report.run["steps_held_off"] <= WHILE_SCALE_FALLS
    said = capsys.readouterr().err
    assert said.count("held off, ") == 2
    assert f"{session.report.run['steps_held_off']} steps were held off in all: 1" in said
    assert " for gradients while the loss scale fell, " in said


def test_an_optimizer_from_before_the_guard(tmp_path: Path) -> None:
    """In a notebook the model and the optimizer are there before `watch()`."""
    net, ((x, _), *_) = model(), batches(1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step, before = torch.optim.SGD.step, weights(net)
    with ampguard.watch(out=tmp_path / "run", on_nonfinite="skip") as session:
        (net(x).square().mean() * float("inf")).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))
    assert session.report.run["steps_held_off"] == 1
    assert torch.optim.SGD.step is step


class Sgd:
    """An optimizer that is none of PyTorch's, as fastai's are; a scaler is given it, or the loop steps it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters, self.steps = list(parameters), 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": self.parameters, "lr": 0.1}]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for parameter in self.parameters:
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


def test_steps_of_an_optimizer_from_elsewhere_are_seen(overridden: Callable[..., Any]) -> None:
    """No hook runs around them: they looked like steps that the scaler has skipped, and a healthy run was ended."""
    net = nn.Linear(4, 2)
    optimizer, scaler = Sgd(net.parameters()), torch.amp.GradScaler("cpu", init_scale=16.0)
    with overridden(on_nonfinite="skip") as session:
        for _ in range(40):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(torch.randn(8, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert session.ended_by is None
    assert optimizer.steps == 40
    assert session.report.run["steps_held_off"] == 0


def test_what_cannot_be_held_off_is_said(overridden: Callable[..., Any]) -> None:
    net = nn.Linear(4, 2)
    optimizer, others = Sgd(net.parameters()), torch.optim.SGD(nn.Linear(4, 2).parameters(), 0.1)
    with overridden(on_nonfinite="skip") as session:
        for step in range(4):
            (net(torch.randn(8, 4)).square().mean() / (0.0 if step == 2 else 1.0)).backward()
            optimizer.step()
    (said,) = session.report.run["could_not"]
    assert said == "bad steps are not held off: what updates the weights is no torch.optim.Optimizer"
    assert not others.state


# --- heal -------------------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Attention scores that do not fit float16, and do not grow beyond float32."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = (300 * self.query(x)) @ (300 * self.key(x)).transpose(-2, -1)
        return torch.softmax(scores / 90000, -1) @ x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Linear(8, 16), Scores(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.embed(x)).mean(1))


def train_attention(
    steps: int = 40, line: bool = False, dtype: torch.dtype | None = None, factor: float = 400
) -> float:
    """The last loss. `line`: an overflow outside every module, in place of the one in the attention."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)) if line else Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(16, 6, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output = net(x)
            if line:
                wide = (output * factor) @ torch.full((4, 4), 200.0)
                output = output + 0 * wide
            loss = nn.functional.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_module_is_healed(overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    exact = train_attention()
    with overridden("fp16", on_nonfinite="heal") as session:
        healed = train_attention()
    assert session.ended_by is None
    assert healed == pytest.approx(exact, rel=0.02)
    run = session.report.run
    assert [(h["cause"], h["action"], h["target"]) for h in run["healed"]] == [
        ("fp16-overflow", "force-fp32", "attention")
    ]
    assert run["in_float32"] == ["attention"]
    assert run["steps_held_off"] == 0  # the call was made again, and the step with it
    assert [(i.cause, i.step) for i in session.report.incidents] == [("fp16-overflow", 0)]
    assert "fp16-overflow in step 0: healed, attention in float32 from now on" in capsys.readouterr().err


def test_the_next_model_of_the_same_names_is_healed_too(overridden: Callable[..., Any]) -> None:
    """Folds, a search over settings, cells of a notebook."""
    exact = train_attention()
    with overridden("fp16", on_nonfinite="heal") as session:
        healed = [train_attention(), train_attention()]
    assert healed == pytest.approx([exact, exact], rel=0.02)
    run = session.report.run
    assert [(h["step"], h["target"]) for h in run["healed"]] == [(0, "attention"), (40, "attention")]
    assert run["steps_held_off"] == 0


def test_a_teacher_of_the_same_names_is_healed_with_its_student(overridden: Callable[..., Any]) -> None:
    torch.manual_seed(4)
    student, x = Net(), torch.randn(16, 6, 8)
    teacher = copy.deepcopy(student).eval()
    optimizer = torch.optim.SGD(student.parameters(), 1e-2)
    with overridden("fp16", on_nonfinite="heal") as session:
        for _ in range(3):
            with torch.no_grad():
                wanted = teacher(0.001 * x)  # known before anything fails
            loss = nn.functional.mse_loss(student(x), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            assert torch.isfinite(teacher(x)).all()
    assert len(session.report.run["healed"]) == 1
    assert session.report.run["steps_held_off"] == 0


@pytest.mark.parametrize("on_nonfinite", ["heal", "observe"])
def test_a_busy_machine_leaves_time_to_heal(
    overridden: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, on_nonfinite: str
) -> None:
    """An investigation that began ten seconds ago, as it were: too long for a card, and not for a fix that is waited for."""
    for_step = Budget.for_step
    monkeypatch.setattr(
        Budget, "for_step", staticmethod(lambda step, began, *least: for_step(step, began - 10, *least))
    )
    with overridden("fp16", on_nonfinite=on_nonfinite) as session:
        train_attention()
    (incident, *_) = session.report.incidents
    is_healing = on_nonfinite == "heal"
    tried_for_it = [fix for fix in incident.fixes if fix.action != "disable-amp"]  # which the cause has asked for
    assert any(fix.verified for fix in tried_for_it) is is_healing
    assert bool(session.report.run["healed"]) is is_healing


class WithStatistics(nn.Module):
    """The loss inside the model, as MAE has it; dropout and running statistics are moved on by each call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.norm, self.inner, self.dropout = nn.BatchNorm1d(8), Net(), nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return nn.functional.cross_entropy(self.inner(x), y)


def train_until_nan(dtype: torch.dtype | None) -> tuple[float, Tensor]:
    """A loop that ends itself on a bad loss, before backward."""
    net = WithStatistics()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.manual_seed(6)
    loss = torch.zeros(())
    for _ in range(10):
        x, y = torch.randn(16, 6, 8), torch.randint(0, 4, (16,))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = net(x, y)
        if not torch.isfinite(loss):
            raise SystemExit("Loss is nan, stopping training")
        loss.backward()
        optimizer.step()
    return loss.item(), net.norm.running_mean.clone()


def test_a_script_that_ends_itself_never_sees_the_bad_loss(overridden: Callable[..., Any]) -> None:
    """The call is made again, from the same random numbers and statistics."""
    exact, mean = train_until_nan(None)
    with pytest.raises(SystemExit):
        train_until_nan(torch.float16)
    with overridden(on_nonfinite="heal") as session:
        healed, healed_mean = train_until_nan(torch.float16)
    assert healed == pytest.approx(exact, rel=0.02)
    torch.testing.assert_close(healed_mean, mean)
    assert [i.cause for i in session.report.incidents] == ["fp16-overflow"]


def test_infinite_logits_are_nobodys_business(overridden: Callable[..., Any]) -> None:
    """Masked actions have a logit of -Inf on purpose."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).masked_fill(torch.tensor([False, False, False, True]), -float("inf"))

    with overridden("bf16", on_nonfinite="heal") as session:
        net, (x, _) = Policy(), batches(1)[0]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), torch.zeros(16, dtype=torch.long)).backward()
            optimizer.step()
    assert session.report.incidents == ()
    assert session.report.run["steps_held_off"] == 0


def test_a_line_is_healed(overridden: Callable[..., Any]) -> None:
    healthy = train_attention(line=True, dtype=torch.float16, factor=1)

    with overridden(on_nonfinite="heal") as session:
        healed = train_attention(line=True, dtype=torch.float16)
    assert session.ended_by is None
    (done,) = session.report.run["healed"]
    assert done["action"] == "force-fp32"
    assert done["target"].startswith("test_nonfinite.py:")
    assert healed == pytest.approx(healthy, rel=0.02)


def test_what_no_precision_cures_is_skipped_and_said(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with overridden(on_nonfinite="heal") as session:
        train({2})
    assert session.report.run["healed"] == []
    assert session.report.run["steps_held_off"] == 1
    assert "cannot be healed from outside" in capsys.readouterr().err


def test_a_refused_mask_is_healed_and_the_call_made_again(overridden: Callable[..., Any]) -> None:
    """PyTorch raises for a constant that does not fit float16: the script would end with a traceback."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).masked_fill(x[:, :4] > 1, -1e9)

    with overridden("fp16", on_nonfinite="heal") as session:
        net, (x, _) = nn.Sequential(Masked(), nn.Tanh()), batches(1)[0]
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sum().backward()
            optimizer.step()
    (done,) = session.report.run["healed"]
    assert (done["cause"], done["action"]) == ("mask-overflow", "force-fp32")
    assert session.report.steps == 3
    assert session.report.run["steps_held_off"] == 0


def test_an_evaluation_is_healed_once(overridden: Callable[..., Any]) -> None:
    """Batches that were evaluated before the fix are no further incidents."""
    with overridden("fp16", on_nonfinite="heal") as session:
        net = Net().eval()
        outputs = []
        with torch.no_grad():
            for _ in range(4):
                outputs.append(net(torch.randn(16, 6, 8)))
    assert [i.cause for i in session.report.incidents] == ["fp16-overflow"]
    assert torch.isfinite(outputs[-1]).all()


def test_of_a_model_and_a_criterion_the_right_one_is_healed(overridden: Callable[..., Any]) -> None:
    """Both are roots, and a root has no name: the line tells which."""

    class Dice(nn.Module):
        def forward(self, output: Tensor) -> Tensor:
            return (output.sigmoid() * 60000).sum().log()

    kinds: list[list[bool]] = []
    with overridden(on_nonfinite="heal") as session:
        net, criterion = nn.Linear(8, 4), Dice()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for x, _ in batches(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                criterion(net(x)).backward()
            optimizer.step()
        kinds.append([type(net) is nn.Linear, type(criterion) is Dice])
    assert kinds == [[True, False]]
    assert [i.cause for i in session.report.incidents] == ["fp16-overflow"]


def test_a_scaler_that_comes_after_a_phase_without_one_is_no_breach(overridden: Callable[..., Any]) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with overridden(on_nonfinite="skip") as session:
        for x, y in batches(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for x, y in batches(5):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert session.report.incidents == ()


def test_modules_that_are_named_by_their_place_are_told_as_modules(
    overridden: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with overridden(on_nonfinite="heal") as session, torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.full((4, 8), 1e5)).float().square().mean()
        loss.backward()
    (healed, *_) = session.report.run["healed"]
    several = "s" if "," in healed["target"] else ""
    assert f"healed, module{several} {healed['target']} in float32" in capsys.readouterr().err
    assert "in module 0" in session.report.incidents[0].explanation
