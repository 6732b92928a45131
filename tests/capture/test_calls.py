"""The protocol's probes around real loops: silent where all is well, exact where it is not, and harmless always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import LOOPS
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, lr_scheduler
from watching import Watched, fingerprint, seed_everything

from ampguard.capture.protocol import habits, moves, norms, reads, routine, scans, schedules, usual_backward
from ampguard.capture.protocol.probing.witness import Witness
from ampguard.protocol.machine import Machine

Guard = Callable[..., Watched]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class Training:
    """A loop in pieces."""

    def __init__(self, scale: float = 1024.0, make: Callable[..., Optimizer] = torch.optim.SGD, **options: Any) -> None:
        seed_everything()
        self.model = Net()
        self.opt = make(self.model.parameters(), lr=1e-2, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def loss(self) -> Tensor:
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        with torch.autocast("cpu", dtype=torch.float16):
            return F.cross_entropy(self.model(x), y)

    def step(self) -> None:
        self.opt.zero_grad()
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.opt)
        self.scaler.update()


def protocol(run: Watched) -> list[str]:
    assert run.faults == 0, run.stderr
    return [i.cause for i in run.report.incidents if i.phase == "protocol"]


PATCHED = [
    (torch, "save"), (torch, "clear_autocast_cache"), (torch.autograd, "backward"), (nn.Module, "zero_grad"),
    (nn.Module, "register_parameter"), (Optimizer, "__init__"), (Optimizer, "zero_grad"), (Optimizer, "load_state_dict"),
    (clip_grad, "clip_grad_norm_"), (nn.utils, "clip_grad_norm_"), (clip_grad, "clip_grad_value_"),
    (lr_scheduler.LRScheduler, "step"), (lr_scheduler.ReduceLROnPlateau, "step"),
    (torch.amp.autocast_mode.autocast, "__enter__"), (torch.Tensor, "norm"), (torch.Tensor, "abs"), (torch, "norm"),
    *((torch.amp.GradScaler, n) for n in ("__init__", "scale", "unscale_", "step", "update", "get_scale", "state_dict")),
]  # fmt: skip


def test_every_patched_attribute_is_the_original_again(guard: Guard) -> None:
    before = [(getattr(owner, name), name in vars(owner)) for owner, name in PATCHED]

    def body() -> int:
        training = Training()
        training.opt.zero_grad()
        training.scaler.scale(training.loss()).backward()  # ends with the read window open
        return sum(getattr(o, n) is not b for (o, n), (b, _) in zip(PATCHED, before, strict=True))

    run = guard(body)
    assert run.result >= 20
    assert [(getattr(owner, name), name in vars(owner)) for owner, name in PATCHED] == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_loops_end_bit_for_bit_the_same_and_break_no_protocol(name: str, guard: Guard) -> None:
    plain = LOOPS[name]()
    run = guard(LOOPS[name])
    assert run.result == plain
    assert protocol(run) == []


HANDLERS = [
    (moves.Moves, n)
    for n in ("created", "scaled", "before_backward", "after_backward", "before_scaler_step", "after_scaler_step",
              "before_update", "updated", "unscaled", "cleared", "tell")
] + [(norms.Norms, "measured"), (usual_backward.UsualBackward, "begins"), (usual_backward.UsualBackward, "ended"),
     (scans.Scans, "after_step"), (habits.Habits, "saving"), (habits.Habits, "tick"), (schedules.Schedules, "moved"),
     (reads.ReadWindow, "open"), (reads.ReadWindow, "close"), (routine.Routine, "matches"), (Witness, "stepped")]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), HANDLERS)
def test_a_fault_inside_a_probe_leaves_the_training_unharmed(
    owner: type, name: str, guard: Guard, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def body() -> dict[str, Any]:
        t = Training()
        schedule = lr_scheduler.StepLR(t.opt, 4)
        for i in range(8):
            t.opt.zero_grad()
            t.scaler.scale(t.loss()).backward()
            if i == 3:
                nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)  # a breach to tell
            t.scaler.unscale_(t.opt)
            t.scaler.step(t.opt)
            t.scaler.update()
            schedule.step()
            torch.save({"model": t.model.state_dict()}, tmp_path / "last.pt")
        return fingerprint(t.model, t.opt, t.scaler)

    plain = body()
    calls = []

    def broken(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError("a bug")

    if name == "matches":  # called outside the barrier: what it calls is inside
        owner, name = routine.Routine, "leave"
    monkeypatch.setattr(owner, name, broken)
    run = guard(body)
    assert run.result == plain
    assert run.faults <= 1
    assert bool(calls) == bool(run.faults)


def test_the_routine_knows_all_that_the_machine_would_have_known(guard: Guard) -> None:
    """Once every iteration is the same the machine sleeps; a breach in iteration 20 names the same lines all the same."""

    def body() -> None:
        t = Training()
        for i in range(24):
            t.opt.zero_grad()
            t.scaler.scale(t.loss()).backward()
            if i == 20:
                (0.1 * t.loss()).backward()
            t.scaler.step(t.opt)
            t.scaler.update()

    run = guard(body)
    assert protocol(run) == ["unscaled-backward"]
    assert (run.first.step, run.first.occurrences) == (20, 1)
    assert run.first.location is not None
    assert run.first.location.code == "(0.1 * t.loss()).backward()"
    assert run.first.evidence["again"]["code"] == "t.scaler.step(t.opt)"


@pytest.mark.parametrize("late", [0, 9, 10])
def test_refusals_after_the_routine_still_name_both_lines(late: int, guard: Guard) -> None:
    def body() -> str:
        t = Training()
        for i in range(12):
            t.opt.zero_grad()
            t.scaler.scale(t.loss()).backward()
            t.scaler.unscale_(t.opt)
            if i == late:
                t.scaler.unscale_(t.opt)
            t.scaler.step(t.opt)
            t.scaler.update()
        return "not refused"

    with pytest.raises(RuntimeError, match="already been called") as raised:
        guard(body)
    assert [e.name for e in raised.traceback if "t.scaler.unscale_" in str(e.statement)] == ["body"]


def gan(n_critic: int) -> None:
    seed_everything()
    maker, critic = nn.Linear(3, 4), nn.Linear(4, 1)
    opt_m, opt_c = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for i in range(24):
        with torch.autocast("cpu", dtype=torch.float16):
            fake = maker(torch.randn(6, 3))
            loss = critic(fake.detach()).mean() - critic(torch.randn(6, 4)).mean()
        opt_c.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt_c)
        scaler.update()
        if i % n_critic == n_critic - 1:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = -critic(fake).mean()
            opt_m.zero_grad()
            scaler.scale(loss).backward()  # spills into the critic
            scaler.step(opt_m)
            scaler.update()


def scaled_by_hand() -> None:
    t = Training()
    t.step()
    for _ in range(6):
        t.opt.zero_grad()
        (t.loss() * t.scaler.get_scale()).backward()
        t.scaler.step(t.opt)
        t.scaler.update()


def divided_by_hand() -> None:
    t = Training()
    for _ in range(6):
        t.opt.zero_grad()
        t.scaler.scale(t.loss()).backward()
        for p in t.model.parameters():
            assert p.grad is not None
            p.grad /= t.scaler.get_scale()
        t.opt.step()


def sums_of_scaled_losses() -> None:
    t = Training()
    for _ in range(6):
        t.opt.zero_grad()
        total = t.scaler.scale(t.loss()) / 2 + t.scaler.scale(t.loss()) + 0.0 * t.model.head.bias.sum()
        total.backward(retain_graph=True)
        total.backward()
        t.scaler.step(t.opt)
        t.scaler.update()


def limit_times_scale() -> None:
    t = Training()
    for _ in range(6):
        t.opt.zero_grad()
        t.scaler.scale(t.loss()).backward()
        nn.utils.clip_grad_norm_(t.model.parameters(), 1.0 * t.scaler.get_scale())
        t.scaler.step(t.opt)
        t.scaler.update()


def fused_and_unscaled() -> None:
    t = Training(make=torch.optim.AdamW, fused=True)
    for i in range(12):
        t.opt.zero_grad()
        t.scaler.scale(t.loss()).backward()
        if i % 2:
            t.scaler.unscale_(t.opt)
            nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
        t.scaler.step(t.opt)
        t.scaler.update()


def heads_in_turn() -> None:
    seed_everything()
    body, heads = nn.Linear(4, 8), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))
    opt = torch.optim.AdamW([*body.parameters(), *heads.parameters()], lr=1e-3)
    for i in range(24):
        opt.zero_grad()
        heads[i % 3](body(torch.randn(3, 4))).sum().backward()
        opt.step()


def flat_buffers() -> None:
    """Parameters and their gradients are views of one storage each, as in apex and FastReID's optimizer, kept right."""
    seed_everything()
    model = Net()
    held = list(model.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in held]))
    flat.grad = torch.zeros_like(flat)
    at = 0
    for p in held:
        p.data = flat.data[at : at + p.numel()].view_as(p)
        p.grad = flat.grad[at : at + p.numel()].view_as(p)
        at += p.numel()
    opt = torch.optim.SGD([flat], lr=1e-2)
    for _ in range(20):
        opt.zero_grad(set_to_none=False)
        F.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,))).backward()
        opt.step()


def weights_only_saved(path: Any) -> None:
    t = Training()
    for _ in range(4):
        t.step()
        torch.save(t.model.state_dict(), path)


def disabled_scaler() -> None:
    t = Training()
    t.scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(6):
        t.step()


def closure_in_scaled_loop() -> None:
    t = Training(make=torch.optim.LBFGS, max_iter=4)

    def closure() -> Tensor:
        t.opt.zero_grad()
        loss = F.cross_entropy(t.model(torch.ones(5, 4)), torch.zeros(5, dtype=torch.long))
        loss.backward()
        return loss

    for _ in range(5):
        t.opt.step(closure)


HEALTHY = [scaled_by_hand, divided_by_hand, sums_of_scaled_losses, limit_times_scale, fused_and_unscaled, heads_in_turn,
           flat_buffers, disabled_scaler, closure_in_scaled_loop]  # fmt: skip


@pytest.mark.parametrize("loop", HEALTHY, ids=lambda loop: loop.__name__)
def test_unusual_loops_that_are_right_are_left_alone(loop: Callable[[], None], guard: Guard) -> None:
    assert protocol(guard(loop)) == []


@pytest.mark.parametrize("n_critic", [1, 5])
def test_gan_with_updates_after_each_backward_is_right(n_critic: int, guard: Guard) -> None:
    assert protocol(guard(lambda: gan(n_critic))) == []


def test_weights_alone_need_no_scaler_beside_them(guard: Guard, tmp_path: Any) -> None:
    assert protocol(guard(lambda: weights_only_saved(tmp_path / "w.pt"))) == []


def test_scaler_saved_in_a_file_of_its_own(guard: Guard, tmp_path: Any) -> None:
    def body() -> None:
        t = Training()
        for _ in range(5):
            t.step()
            torch.save({"model": t.model.state_dict(), "optimizer": t.opt.state_dict()}, tmp_path / "last.pt")
            torch.save(t.scaler.state_dict(), tmp_path / "scaler.pt")

    assert protocol(guard(body)) == []


def test_poisoned_checkpoint_is_told_with_its_path(guard: Guard, tmp_path: Any) -> None:
    def body() -> None:
        t = Training()
        t.step()
        with torch.no_grad():
            t.model.head.weight[1, 2] = float("nan")
        torch.save({"weights": t.model.state_dict()}, tmp_path / "poisoned.pt")

    run = guard(body)
    incident = next(i for i in run.report.incidents if i.cause == "nonfinite-parameter")
    assert (incident.phase, incident.severity, incident.module) == ("parameters", "error", "head")
    assert incident.evidence["path"] == str(tmp_path / "poisoned.pt")
    assert incident.evidence["names"] == ["head.weight"]
    assert incident.evidence["bad_values"] == 1


def test_buffers_that_begin_at_infinity_are_no_poison(guard: Guard, tmp_path: Any) -> None:
    def body() -> None:
        t = Training()
        t.model.register_buffer("lowest", torch.full((3,), float("inf")))
        t.step()
        torch.save(t.model.state_dict(), tmp_path / "w.pt")

    assert guard(body).causes == []


def test_compiled_and_scripted_code_is_left_alone(guard: Guard) -> None:
    def body() -> dict[str, Any]:
        t = Training()
        compiled = torch.compile(t.model, backend="eager")
        for _ in range(6):
            t.opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = compiled(torch.ones(2, 4)).float().norm()
            t.scaler.scale(loss).backward()
            t.scaler.step(t.opt)
            t.scaler.update()
        return fingerprint(t.model, t.opt, t.scaler)

    plain = body()
    torch._dynamo.reset()
    run = guard(body)
    assert run.result == plain
    assert protocol(run) == []


def plain_step(training: Training) -> None:
    training.loss().backward()
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.opt.step()


@pytest.mark.parametrize("clearing", ["opt", "model"])
def test_without_a_scaler_there_is_a_routine_too(clearing: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[Any] = []
    original = Machine.feed

    def feed(machine: Machine, event: Any) -> Any:
        fed.append(event)
        return original(machine, event)

    monkeypatch.setattr(Machine, "feed", feed)

    def body() -> list[int]:
        training, counts = Training(), []
        for _ in range(40):
            getattr(training, clearing).zero_grad()
            plain_step(training)
            counts.append(len(fed))
        return counts

    run = guard(body)
    assert protocol(run) == []
    assert run.result[-1] == run.result[33]  # the next close look is at step 64


@pytest.mark.parametrize("clearing", ["opt", "model"])
@pytest.mark.parametrize("late", [20, 21, 37])
def test_what_breaks_the_routine_without_a_scaler_is_seen(late: int, clearing: str, guard: Guard) -> None:
    def body() -> None:
        training = Training()
        for i in range(late + 6):
            if i < late:
                getattr(training, clearing).zero_grad()
            plain_step(training)

    run = guard(body)
    assert protocol(run) == ["missing-zero-grad"]
    assert run.first.step in range(late, late + 5)


def test_a_module_clears_only_its_own_gradients_in_the_routine(guard: Guard) -> None:
    def body() -> None:
        training = Training()
        for i in range(40):
            (training.model if i < 30 else next(training.model.children())).zero_grad()  # from then on the rest adds up
            plain_step(training)

    assert protocol(guard(body)) == ["missing-zero-grad"]


def test_a_scaler_that_comes_late_is_followed(guard: Guard) -> None:
    def body() -> None:
        training = Training()
        for _ in range(20):
            training.opt.zero_grad()
            plain_step(training)
        for _ in range(5):
            training.opt.zero_grad()
            training.scaler.scale(training.loss()).backward()
            training.opt.step()  # past the scaler

    assert protocol(guard(body)) == ["bypassed-scaler"]


class ClipsInside(torch.optim.SGD):
    """As detectron2 makes its optimizers."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def test_clipping_inside_the_optimizers_own_step_comes_after_unscaling(guard: Guard) -> None:
    def body() -> None:
        training = Training(make=ClipsInside)
        for _ in range(20):
            training.step()

    assert protocol(guard(body)) == []


@pytest.mark.parametrize("explicit", [True, False])
def test_a_call_of_the_routine_that_is_refused_is_told(explicit: bool, guard: Guard) -> None:
    """Late in the run the same calls come as always, but some gradients are float16 now."""

    def body() -> None:
        training = Training()
        for i in range(24):
            training.opt.zero_grad()
            if i == 20:
                training.model.half()
            training.scaler.scale(training.loss()).backward()
            if explicit:
                training.scaler.unscale_(training.opt)
            training.scaler.step(training.opt)
            training.scaler.update()

    told: list[Any] = []

    def caught() -> None:
        with pytest.raises(ValueError, match="unscale FP16") as error:
            body()
        told.append(error)

    run = guard(caught)
    assert told
    assert protocol(run) == ["fp16-parameters"]
    assert run.first.step == 20
