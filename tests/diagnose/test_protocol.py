"""What the card says of a broken protocol: whose, where, by how much, and what to do, in the script's own names."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ampguard.incident import Incident
from ampguard.report.explain import explain

Guard = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def loss_of(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return F.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,)))


def new_scaler(scale: float = 256.0) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def refused(guard: Guard, body: Callable[[], object], what: str) -> Incident:
    """The one error of a script that PyTorch stops; the exception reaches the script."""
    seen: list[str] = []

    def script() -> None:
        try:
            body()
        except (AssertionError, RuntimeError, ValueError) as error:
            seen.append(str(error))

    run = guard(script)
    assert run.faults == 0
    assert what in seen[0]
    (incident,) = [i for i in run.report.incidents if i.phase == "protocol"]
    return incident


class Trainer:
    """Optimizers behind attributes, lists and helpers, as engines have them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.maker, self.critic = Net(), Net()
        self.opts = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (self.maker, self.critic)]
        self.grad_scaler = new_scaler()

    def step(self, which: int) -> None:
        self.grad_scaler.scale(loss_of(self.maker)).backward()
        self.grad_scaler.step(self.opts[which])


def test_another_optimizers_turn(guard: Guard) -> None:
    incident = refused(guard, lambda: Trainer().step(1), "No inf checks")
    assert incident.cause == "no-gradients"
    assert "`self.opts[1]`" in incident.explanation
    assert "reached only the parameters of `self.opts[0]`" in incident.explanation
    assert incident.location is not None
    assert incident.location.code == "self.grad_scaler.step(self.opts[which])"


def test_frozen_parameters_are_named(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        model.body.requires_grad_(False)
        opt_body = torch.optim.SGD(model.body.parameters(), lr=0.1)
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt_body)

    incident = refused(guard, body, "No inf checks")
    assert incident.evidence["why"] == "frozen"
    assert incident.evidence["parameters"] == ["body.weight", "body.bias"]
    assert (incident.module, incident.evidence["optimizer"]) == ("body", "opt_body")


def test_cleared_between_backward_and_step(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model)).backward()
        model.zero_grad()
        scaler.step(opt)

    incident = refused(guard, body, "No inf checks")
    assert incident.evidence["why"] == "cleared"
    assert incident.evidence["first"]["code"] == "model.zero_grad()"
    assert "scaler.scale(loss_of(model)).backward()" in incident.explanation


def test_copied_model(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model = copy.deepcopy(model)
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)

    incident = refused(guard, body, "No inf checks")
    assert incident.cause == "stale-parameters"
    assert incident.evidence["lost_count"] == 4
    assert incident.fixes[0].action == "rebuild-optimizer"


def test_window_that_begins_late_and_is_unscaled_in_each_pass(guard: Guard) -> None:
    """Told as an update that was left out, for the loop has never accumulated before; what else it may be is said."""

    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(12):
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(opt)
            if step < 6 or step % 2:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()

    incident = refused(guard, body, "already been called")
    assert (incident.cause, incident.step, incident.evidence["was_kept"]) == ("missing-update", 6, True)
    assert "accumulated" in incident.fixes[1].how


@pytest.mark.parametrize("is_scaled", [True, False])
def test_copy_trained_in_place_of_the_model_from_some_step_on(is_scaled: bool, guard: Guard) -> None:
    """An average of the weights that is meant to be evaluated only; the model itself is alive, and was called before."""

    def body() -> None:
        torch.manual_seed(0)
        model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=64.0, enabled=is_scaled)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        average = torch.optim.swa_utils.AveragedModel(model)
        with contextlib.suppress(AssertionError):
            for step in range(12):
                opt.zero_grad()
                scaler.scale(loss_of(model if step < 5 else average)).backward()
                scaler.step(opt)
                scaler.update()

    run = guard(body)
    assert run.causes == ["stale-parameters"]
    assert (run.first.step, run.first.evidence["lost_count"]) == (5, 4)
    assert "not called in this step" in run.first.explanation


def test_fused_optimizer_without_gradients_is_refused_at_the_update(guard: Guard) -> None:
    def body() -> None:
        model, other, scaler = Net(), nn.Linear(2, 2), new_scaler()
        opt = torch.optim.AdamW(other.parameters(), fused=True)
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.update()

    incident = refused(guard, body, "No inf checks were recorded prior to update")
    assert (incident.cause, incident.evidence["optimizer"]) == ("no-gradients", "opt")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_flat_buffers(set_to_none: bool, guard: Guard) -> None:
    """FastReID's: with set_to_none nothing is learned, and no error comes; without it all is well."""

    def body() -> None:
        torch.manual_seed(0)
        model = Net()
        held = list(model.parameters())
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in held]))
        flat.grad = torch.zeros_like(flat)
        at = 0
        for p in held:
            p.data = flat.data[at : at + p.numel()].view_as(p)
            p.grad = flat.grad[at : at + p.numel()].view_as(p)
            at += p.numel()
        optimizer = torch.optim.SGD([flat], lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad(set_to_none=set_to_none)
            for p in held:
                if set_to_none:
                    p.grad = None
            loss_of(model).backward()
            optimizer.step()

    run = guard(body)
    if not set_to_none:
        assert run.causes == []
        return
    (incident,) = run.report.incidents
    assert (incident.cause, incident.fixes[0].action) == ("stale-parameters", "keep-grad-buffers")
    assert "optimizer.zero_grad(set_to_none=False)" in incident.fixes[0].how
    assert "body.weight" in incident.explanation


def test_unscaled_second_time_through_accelerates_order(guard: Guard) -> None:
    """Unscale all, then step and update each: the second optimizer's gradients are divided twice."""

    def body() -> None:
        torch.manual_seed(0)
        a, b, scaler = Net(), Net(), new_scaler()
        opt_a, opt_b = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in (a, b))
        for _ in range(3):
            opt_a.zero_grad(), opt_b.zero_grad()
            scaler.scale(loss_of(a) + loss_of(b)).backward()
            for opt in (opt_a, opt_b):
                scaler.unscale_(opt)
            for opt in (opt_a, opt_b):
                scaler.step(opt)
                scaler.update()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity, incident.occurrences) == ("missing-update", "error", 3)
    assert incident.evidence["factor"] == pytest.approx(1 / 256)
    assert incident.evidence["twice"] is True


def test_norm_that_is_only_logged_is_a_warning(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            total = sum(float((p.grad.detach() ** 2).sum()) for p in model.parameters() if p.grad is not None)
            assert total >= 0
            scaler.step(opt)
            scaler.update()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity) == ("clip-before-unscale", "warning")
    assert "256 times too large" in incident.explanation


def test_gradients_divided_by_hand_and_by_the_scaler(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad / scaler.get_scale()
            scaler.step(opt)
            scaler.update()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.evidence["factor"]) == ("double-unscale", pytest.approx(1 / 256))


def test_direct_step_after_the_scaler_has_found_inf(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.scale(loss_of(model)).backward()
        assert model.head.bias.grad is not None
        model.head.bias.grad[0] = float("inf")
        scaler.unscale_(opt)
        opt.step()

    incident = next(i for i in guard(body).report.incidents if i.phase == "protocol")
    assert incident.cause == "bypassed-scaler"
    assert "scaler.step(opt)" in incident.explanation


def test_a_step_of_its_own_behind_one_that_the_scaler_skipped(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model) * 2.0**14).backward()
            scaler.step(opt), scaler.update(), opt.step()

    bypassed, *others = guard(body).report.incidents
    assert (bypassed.cause, bypassed.step) == ("bypassed-scaler", 0)
    assert bypassed.explanation.startswith("`opt` was stepped once more")
    assert "had skipped its step at" in bypassed.explanation
    assert "nonfinite-parameter" not in [incident.cause for incident in others]  # it is this step's doing


@pytest.mark.parametrize("repairs", [False, True])
def test_a_step_of_its_own_behind_the_scaler_s(guard: Guard, repairs: bool) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(5):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            if repairs:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            opt.step()

    causes = [i.cause for i in guard(body).report.incidents if i.severity == "error"]
    assert causes == ([] if repairs else ["bypassed-scaler"])


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_closure_inside_the_scaler_s_step(guard: Guard, is_scaled: bool) -> None:
    """PyTorch refuses a closure only where it is given as a keyword."""

    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=1e-5)

        def closure() -> Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            (scaler.scale(loss) if is_scaled else loss).backward()
            return loss

        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt, closure)
            scaler.update()

    run = guard(body)
    assert run.causes == (["bypassed-scaler"] if is_scaled else [])
    if is_scaled:
        (incident,) = run.report.incidents
        assert (incident.step, incident.severity, incident.evidence["factor"]) == (0, "error", 256.0)
        assert "scaler.step(opt, closure)" in incident.location.code


def test_resumed_without_the_scaler(guard: Guard) -> None:
    def body(loads: bool) -> Callable[[], None]:
        def script() -> None:
            model = Net()
            old = torch.optim.AdamW(model.parameters())
            loss_of(model).backward()
            old.step()
            states = old.state_dict()
            optimizer, scaler = torch.optim.AdamW(model.parameters()), new_scaler()
            optimizer.load_state_dict(states)
            if loads:
                scaler.load_state_dict(new_scaler(64.0).state_dict())
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(optimizer)
                scaler.update()

        return script

    (incident,) = guard(body(False)).report.incidents
    assert (incident.cause, incident.severity) == ("scaler-not-saved", "warning")
    assert incident.evidence["resumed"] is True


@pytest.mark.parametrize("interval", [1, 2000])
def test_saved_without_a_scaler_whose_scale_has_or_has_not_moved(interval: int, guard: Guard, tmp_path: Path) -> None:
    def script() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=interval)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt")

    (incident,) = guard(script).report.incidents
    assert incident.cause == "scaler-not-saved"
    assert ("its initial one still, 64" in incident.explanation) == (interval > 3)


@pytest.mark.parametrize("travels", [True, False])
def test_state_of_the_scaler_inside_that_of_the_optimizer(travels: bool, guard: Guard, tmp_path: Path) -> None:
    """FastReID's checkpoints hold no trainer: a hook puts the scaler's state beside "state" and "param_groups"."""

    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.AdamW(model.parameters())
        states = {"scale": 256.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        if travels:
            opt.register_state_dict_post_hook(lambda _, state: state.update(grad_scaler=states))
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "last.pth")

    run = guard(body)
    assert run.causes == ([] if travels else ["scaler-not-saved"])


@pytest.mark.parametrize("has_scaler", [True, False])
def test_a_checkpoint_in_several_files(has_scaler: bool, guard: Guard, tmp_path: Path) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            torch.save(model.state_dict(), tmp_path / "model.pt")
            torch.save({"optimizer": opt.state_dict(), "epoch": 1}, tmp_path / "trainer.pt")
            if has_scaler:
                torch.save(scaler.state_dict(), tmp_path / "scaler.pt")

    run = guard(body)
    assert run.causes == ([] if has_scaler else ["scaler-not-saved"])


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedule_that_loses_its_first_move_is_a_note(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model, scaler = Net(), new_scaler(2.0**18)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=50)
        for _ in range(20):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            schedule.step()

    run = guard(body)
    (incident,) = [i for i in run.report.incidents if i.phase == "protocol"]
    assert (incident.cause, incident.severity) == ("scheduler-on-skipped-step", "info")
    assert run.report.status == "clean"


def test_a_breach_in_every_step_is_one_incident_and_takes_no_investigation(guard: Guard, tmp_path: Path) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        for i in range(6):
            opt.zero_grad()
            x = torch.randn(5, 4)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(model(x), torch.randint(0, 3, (5,))) * (
                    1.0 if i < 5 else torch.log(-x.abs().max())
                )
            scaler.scale(loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

    run = guard(body, max_incidents=1)
    assert run.causes == ["clip-before-unscale", "domain-error"]
    assert run.first.occurrences == 6


def test_stop_at_the_first_error(guard: Guard) -> None:
    steps: list[int] = []

    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        for i in range(6):
            scaler.scale(loss_of(model)).backward()
            opt.step()
            steps.append(i)

    run = guard(body, on_nonfinite="stop")
    assert run.causes == ["bypassed-scaler"]
    assert steps == []


def test_pages_are_found_without_importing_the_rules() -> None:
    assert explain("clip-before-unscale").startswith("clip-before-unscale: gradients are clipped")
    assert "Not this" in explain("missing-update")


def test_broken_window_is_told_where_it_was_broken(guard: Guard) -> None:
    """At the `unscale_` or the `update` inside the window, not at the step that uses what came of it."""

    def body(breaks: Callable[[Any, Any], object]) -> Callable[[], None]:
        def script() -> None:
            model, scaler = Net(), new_scaler()
            opt = torch.optim.SGD(model.parameters(), lr=1e-3)
            for i in range(12):
                scaler.scale(loss_of(model) / 2).backward()
                if i % 2 == 0:
                    breaks(scaler, opt)
                else:
                    scaler.step(opt)
                    scaler.update()
                    opt.zero_grad()

        return script

    def unscales(scaler: Any, opt: Any) -> None:
        scaler.unscale_(opt)

    incident = guard(body(unscales)).first
    assert (incident.cause, incident.location.code) == ("accumulation-broken", "scaler.unscale_(opt)")


def test_update_inside_a_window_is_the_place(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        for i in range(12):
            scaler.scale(loss_of(model) / 2).backward()
            if i % 2 == 0 and i > 4:
                scaler.update(scaler.get_scale() / 2)
            elif i % 2:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()

    incident = guard(body).first
    assert (incident.cause, incident.location.code) == ("accumulation-broken", "scaler.update(scaler.get_scale() / 2)")


@pytest.mark.parametrize("since", [12, 30])
def test_an_optimizer_that_joins_late_is_told_of_its_first_step(guard: Guard, since: int) -> None:
    """A probe that is trained beside a model from some iteration on, by the same scaler and a loss that nobody scales."""

    def body() -> None:
        torch.manual_seed(0)
        model, probe = nn.Linear(8, 8), nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        probe_optimizer = torch.optim.SGD(probe.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(40):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                features = model(x)
            scaler.scale(features.float().square().mean()).backward()
            scaler.step(optimizer)
            if step >= since:
                probe_optimizer.zero_grad()
                nn.functional.cross_entropy(probe(features.detach().float()), torch.randint(4, (16,))).backward()
                scaler.step(probe_optimizer)
            scaler.update()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (incident,) = run.report.incidents
    assert (incident.cause, incident.step) == ("unscaled-backward", since)
