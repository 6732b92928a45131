"""What several optimizers, scalers and regions have in common: shared parameters, the wrong scaler, old casts, new parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import weight_norm

from ampguard.capture.protocol.gradients import OptimizerWatch
from ampguard.capture.protocol.shared import SharedParameters
from ampguard.incident import Incident

Guard = Callable[..., Any]


def loss_of(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(torch.randn(6, 4))
    return F.cross_entropy(logits.float(), torch.randint(0, 3, (6,)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def scaler_of(scale: float = 256.0) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def all_of(run: Any) -> list[Incident]:
    assert run.faults == 0, run.stderr
    return [i for i in run.report.incidents if i.severity != "info"]


# --- parameters that two optimizers hold ---------------------------------------------------------------------------------


class Task:
    def __init__(self, trunk: nn.Module) -> None:
        self.head = nn.Linear(8, 3)
        self.opt = torch.optim.SGD([*trunk.parameters(), *self.head.parameters()], lr=0.05)


def two_tasks(together: bool, unscales: bool, clips: bool = False) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        trunk, scaler = nn.Linear(4, 8), scaler_of()
        tasks = [Task(trunk), Task(trunk)]
        for _ in range(4):
            if together:
                for task in tasks:
                    task.opt.zero_grad()
                scaler.scale(sum(loss_of(nn.Sequential(trunk, task.head)) for task in tasks)).backward()
            for task in tasks:
                if not together:
                    task.opt.zero_grad()
                    scaler.scale(loss_of(nn.Sequential(trunk, task.head))).backward()
                if unscales:
                    scaler.unscale_(task.opt)  # for each
                if clips:
                    nn.utils.clip_grad_norm_(trunk.parameters(), 1e-6)
                if not (unscales and together):
                    scaler.step(task.opt)  # for each
            for task in tasks if unscales and together else ():
                scaler.step(task.opt)
            scaler.update()

    return body


@pytest.mark.parametrize(("unscales", "clips"), [(True, False), (True, True), (False, False)])
def test_shared_parameters_are_unscaled_for_each_optimizer(unscales: bool, clips: bool, guard: Guard) -> None:
    incident = all_of(guard(two_tasks(True, unscales, clips)))[0]
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("double-unscale", 0, 1 / 256)
    assert incident.location is not None
    assert incident.location.code.endswith("# for each")
    assert {"tasks[0].opt", "tasks[1].opt"} == {incident.evidence["optimizer"], incident.evidence["shared_with"]}
    assert incident.evidence["parameter_count"] == 2
    assert incident.fixes[0].action == "rebuild-optimizer"


def updated_between(together: bool) -> None:
    """As Accelerate and Lightning do: an update inside the step of each optimizer."""
    torch.manual_seed(0)
    trunk, scaler = nn.Linear(4, 8), scaler_of()
    tasks = [Task(trunk), Task(trunk)]
    for _ in range(6):
        if together:
            for task in tasks:
                task.opt.zero_grad()
            scaler.scale(sum(loss_of(nn.Sequential(trunk, task.head)) for task in tasks)).backward()
        for task in tasks:
            if not together:
                task.opt.zero_grad()
                scaler.scale(loss_of(nn.Sequential(trunk, task.head))).backward()
            scaler.step(task.opt)
            scaler.update()


def test_shared_parameters_with_an_update_for_each_optimizer(guard: Guard) -> None:
    (incident,) = all_of(guard(lambda: updated_between(True)))
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("double-unscale", 0, 1 / 256)
    assert incident.evidence["shared_with"] == "tasks[0].opt"
    assert incident.evidence["parameter_count"] == 2


def test_shared_parameters_with_an_update_and_a_backward_pass_for_each(guard: Guard) -> None:
    assert all_of(guard(lambda: updated_between(False))) == []


@pytest.mark.parametrize("unscales", [False, True])
def test_shared_parameters_with_a_backward_pass_for_each_optimizer(unscales: bool, guard: Guard) -> None:
    assert all_of(guard(two_tasks(False, unscales))) == []


def test_clipping_what_was_unscaled_for_one_of_two_optimizers(guard: Guard) -> None:
    """They take turns; each one's ledger holds the shared gradients of the other's backward pass as scaled."""

    def body() -> None:
        torch.manual_seed(0)
        trunk, scaler = nn.Linear(4, 8), scaler_of()
        tasks = [Task(trunk), Task(trunk)]
        for turn in range(12):
            for task in tasks:
                task.opt.zero_grad()
                scaler.scale(loss_of(nn.Sequential(trunk, task.head))).backward()
                scaler.unscale_(task.opt)
                nn.utils.clip_grad_norm_([*trunk.parameters(), *task.head.parameters()], 0.1)
                scaler.step(task.opt)
                if turn % 2:
                    scaler.update()
            if not turn % 2:
                scaler.update()

    assert all_of(guard(body)) == []


# --- two scalers ---------------------------------------------------------------------------------------------------------


def test_one_of_two_losses_scaled_by_the_other_scaler(guard: Guard) -> None:
    def body() -> None:
        model, of_it, of_another = net(), scaler_of(256.0), scaler_of(4096.0)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            opt.zero_grad()
            of_it.scale(loss_of(model)).backward()
            penalty = loss_of(model)
            of_another.scale(penalty).backward()
            of_it.step(opt)
            of_it.update()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.evidence["scales"]) == ("unscaled-backward", [4096.0])
    assert incident.location is not None
    assert incident.location.code == "of_another.scale(penalty).backward()"
    assert incident.explanation.startswith("One of the losses was scaled by one scaler")
    assert incident.fixes[0].how.endswith("of_it.scale(penalty).backward()")


# --- old casts -----------------------------------------------------------------------------------------------------------


def in_one_region(loops_inside: bool) -> Callable[[], None]:
    def iteration(critic: nn.Module, opt: torch.optim.Optimizer, scaler: Any) -> None:
        opt.zero_grad()
        scaler.scale(critic(torch.randn(6, 4)).float().mean()).backward()
        scaler.step(opt)
        if not loops_inside:
            scaler.scale(critic(torch.randn(6, 4)).float().mean()).backward()
        scaler.update()

    def body() -> None:
        critic, scaler = net(), scaler_of()
        opt = torch.optim.SGD(critic.parameters(), lr=0.05)
        if loops_inside:
            with torch.autocast("cpu", dtype=torch.float16):
                for _ in range(4):
                    iteration(critic, opt, scaler)
        for _ in range(0 if loops_inside else 4):
            with torch.autocast("cpu", dtype=torch.float16):
                iteration(critic, opt, scaler)

    return body


@pytest.mark.parametrize(("loops_inside", "severity"), [(True, "error"), (False, "warning")])
def test_a_region_that_outlasts_a_step(loops_inside: bool, severity: str, guard: Guard) -> None:
    (incident,) = all_of(guard(in_one_region(loops_inside)))
    assert (incident.cause, incident.severity) == ("autocast-cache", severity)
    assert ("have no effect on the loss" in incident.explanation) is loops_inside
    assert incident.occurrences > 1


# --- gradients that are gone, parameters that are new --------------------------------------------------------------------


def test_gradients_cleared_before_a_step_without_a_scaler(guard: Guard) -> None:
    def body() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            loss_of(model).backward()
            opt.zero_grad()
            opt.step()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.evidence["why"]) == ("no-gradients", "cleared")
    assert "cleared at" in incident.explanation
    assert incident.evidence["first"]["code"] == "opt.zero_grad()"


def test_gradients_taken_away_by_hand_before_a_step(guard: Guard) -> None:
    def body() -> None:
        model = net()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            loss_of(model).backward()
            for p in model.parameters():
                p.grad = None
            opt.step()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.evidence["why"]) == ("no-gradients", "cleared")
    assert "cleared by hand" in incident.explanation


@pytest.mark.parametrize("scaled", [True, False])
def test_weights_assigned_anew_in_the_middle_of_a_run(scaled: bool, guard: Guard) -> None:
    """What the optimizer held keeps its last gradients, which nobody clears: no error, and no None to be seen."""

    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(12):
            if step == 6:
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
            model.zero_grad()
            loss = loss_of(model)
            if scaled:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            else:
                loss.backward()
                opt.step()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.evidence["lost_count"]) == ("stale-parameters", 4)
    assert incident.step in ((6,) if scaled else (6, 7))
    assert "get no gradient any more" in incident.explanation


def test_an_optimizer_that_no_backward_pass_reaches_any_more(guard: Guard) -> None:
    def body() -> None:
        model, other, scaler = net(), net(), scaler_of()
        opts = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, other)]
        for step in range(12):
            opts[0].zero_grad()
            scaler.scale(loss_of(model)).backward()
            if step < 4:
                opts[1].zero_grad()
                scaler.scale(loss_of(other)).backward()
            for opt in opts:
                scaler.step(opt)
            scaler.update()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.severity) == ("missing-zero-grad", "warning")
    assert (incident.evidence["is_reused"], incident.evidence["optimizer"]) == (True, "opts[1]")


def wraps_anew(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.data)


@pytest.mark.parametrize(
    ("replaces", "said"),
    [
        (lambda model: weight_norm(model[0]), "A parametrization (weight_norm"),
        (wraps_anew, "wrapped in new parameters"),
    ],
)
def test_parameters_replaced_after_the_optimizer_are_no_flat_buffer(
    replaces: Callable[[nn.Sequential], object], said: str, guard: Guard
) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        replaces(model)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    (incident,) = all_of(guard(body))
    assert (incident.cause, incident.evidence["flat_buffers"], incident.module) == ("stale-parameters", False, "0")
    assert said in incident.explanation
    assert incident.fixes[0].action == "rebuild-optimizer"


# --- the inner optimizer -------------------------------------------------------------------------------------------------


class Around(torch.optim.Optimizer):
    """Has an optimizer of its own, as sharpness-aware minimisation and Lookahead do."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)

    def descend(self) -> None:
        self.base.step()
        self.zero_grad()


def test_the_inner_optimizer_is_named_as_the_line_has_it(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        around = Around(model.parameters(), lr=1e-5)
        for _ in range(3):
            scaler.scale(loss_of(model)).backward()
            around.descend()

    incident = all_of(guard(body))[0]
    assert incident.cause == "bypassed-scaler"
    assert incident.fixes[0].how.startswith("let the scaler step: scaler.step(self.base)")


def test_a_second_step_of_the_same_iteration_is_not_called_the_next_one(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for turn in range(2):  # two critic steps to one update
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if turn == 0:
                scaler.step(opt)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(opt)

    (incident,) = all_of(guard(body))
    assert incident.cause == "missing-update"
    assert "next iteration" not in incident.explanation
    assert "behind every scaler.step(opt)" in incident.fixes[0].how


def test_a_new_gradient_in_old_memory_is_not_the_one_that_was_divided() -> None:
    """Cleared and made anew, it may have the identity and the version of the one before."""
    layer = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for _ in range(2)]
    one, other = (OptimizerWatch(opt, i, None) for i, opt in enumerate(optimizers))
    for _ in range(50):
        shared = SharedParameters()
        layer(torch.ones(1, 3)).sum().backward()
        before = {id(p.grad) for p in layer.parameters()}
        shared.divided(one, [one, other], None)
        assert shared.again(other) is not None
        layer.zero_grad()
        layer(torch.ones(1, 3)).sum().backward()
        assert shared.again(other) is None
        if before & {id(p.grad) for p in layer.parameters()}:
            return
        layer.zero_grad()
    pytest.skip("no memory was given out again")
