"""What a card says about calls that come twice, in a loop, in a hook, or on another object than was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ampguard.incident import Incident

Guard = Callable[..., Any]
SCALE = 256.0


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(torch.randn(6, 4))
    return F.cross_entropy(logits.float(), torch.randint(0, 2, (6,)))


def scaler_of(scale: float = SCALE) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def only(run: Any) -> Incident:
    assert run.faults == 0, run.stderr
    told = [i for i in run.report.incidents if i.severity != "info"]
    assert len(told) == 1, [i.cause for i in told]
    return told[0]


def how(incident: Incident) -> str:
    return incident.fixes[0].how


def raises(words: str, body: Callable[[], None]) -> Callable[[], None]:
    def script() -> None:
        with pytest.raises((RuntimeError, AssertionError), match=words):
            body()

    return script


# --- hooks that divide ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [True, False])
def test_a_hook_that_divides_by_the_scale_and_the_scaler_again(complete: bool, guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            if complete:
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / scaler.get_scale()))
            else:
                p.register_hook(lambda g: g / scaler.get_scale())
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("double-unscale", 0, 1 / SCALE)
    assert incident.location is not None
    assert "hook(" in incident.location.code


def test_a_hook_that_divides_before_the_optimizers_own_step_is_right(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.register_hook(lambda g: g / scaler.get_scale())
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            opt.step()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])


def test_a_hook_that_weights_gradients_of_one_size_does_not_clip_them(guard: Guard) -> None:
    """Two classes: the last bias has the gradients g and -g. Half of them is no limit on their values."""

    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.register_hook(lambda g: g * 1e-3)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    run = guard(body)
    assert (run.faults, run.causes) == (0, [])


# --- flat buffers ---------------------------------------------------------------------------------------------------------


class Flat:
    """Parameters as views of one buffer, their gradients as views of another; `room`: what is left free behind them."""

    def __init__(self, model: nn.Module, room: int = 0) -> None:
        held = list(model.parameters())
        size = sum(p.numel() for p in held)
        self.buffer = nn.Parameter(torch.zeros(size + room))
        self.buffer.grad = torch.zeros(size + room)
        at = 0
        for p in held:
            view = self.buffer.data[at : at + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data, p.grad = view, self.buffer.grad[at : at + p.numel()].view_as(p)
            at += p.numel()


def flat_training(moves: bool, room: int = 0) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        flat = Flat(model, room)
        optimizer = torch.optim.SGD([flat.buffer], lr=0.1)
        if moves:
            model = model.to(memory_format=torch.channels_last)
        for _ in range(5):
            assert flat.buffer.grad is not None
            flat.buffer.grad.zero_()
            F.cross_entropy(model(torch.randn(5, 3, 4, 4)), torch.randint(0, 2, (5,))).backward()
            optimizer.step()

    return body


def test_a_weight_that_left_its_flat_buffer(guard: Guard) -> None:
    incident = only(guard(flat_training(moves=True)))
    assert incident.cause == "stale-parameters"
    assert incident.evidence["parameters"] == ["0.weight"]
    assert incident.fixes[0].action == "rebuild-optimizer"
    assert "make the flat buffers and optimizer" in how(incident)


@pytest.mark.parametrize("room", [0, 64])
def test_a_buffer_that_holds_them_all_is_right(room: int, guard: Guard) -> None:
    run = guard(flat_training(moves=False, room=room))
    assert (run.faults, run.causes) == (0, [])


# --- calls that come twice ------------------------------------------------------------------------------------------------


def test_one_optimizer_under_two_names(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        one = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers = {"body": one, "head": one}
        scaler.scale(loss_of(model)).backward()
        for each in optimizers.values():
            scaler.unscale_(each)

    incident = only(guard(raises("already been called", body)))
    assert incident.cause == "double-unscale"
    assert "`optimizers['body']` and `optimizers['head']` are one and the same optimizer" in incident.explanation
    assert "delete" not in how(incident)


def test_an_update_that_comes_twice(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()  # first
            scaler.update()  # second

    incident = only(guard(raises("prior to update", body)))
    assert (incident.cause, incident.step) == ("missing-update", 0)
    assert "called twice in one iteration" in incident.explanation
    assert "delete the second" in how(incident)


def test_an_update_in_a_finally_that_a_batch_is_passed_over_to(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            try:
                if step == 1:
                    continue
                opt.zero_grad()
                scaler.scale(loss_of(model)).backward()
                scaler.step(opt)
            finally:
                scaler.update()

    incident = only(guard(raises("prior to update", body)))
    assert incident.cause == "missing-update"
    assert "it came round again, and no optimizer went through the scaler since" in incident.explanation
    assert "only where a step was made" in how(incident)
    assert "delete" not in how(incident)


def test_an_update_without_a_step_is_not_called_a_second_one(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            if step == 0:
                scaler.step(opt)
            scaler.update()

    incident = only(guard(raises("prior to update", body)))
    assert "called without a step" in incident.explanation


def test_unscaling_behind_the_step_belongs_to_its_iteration(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.scale(loss_of(model)).backward()
        scaler.step(opt)
        scaler.unscale_(opt)

    incident = only(guard(raises("after step", body)))
    assert (incident.cause, incident.step) == ("double-unscale", 0)
    assert how(incident).startswith("unscale before the step: scaler.unscale_(opt) in front of ")


# --- other objects than were meant ----------------------------------------------------------------------------------------


def test_the_scaler_that_scaled_is_named_with_its_line(guard: Guard) -> None:
    def body() -> None:
        model, first, second = net(), scaler_of(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        first.scale(loss_of(model)).backward()
        second.step(opt)

    incident = only(guard(raises("_scale is None", body)))
    assert incident.cause == "unscaled-backward"
    assert "scaled by `first`, at " in incident.explanation
    assert "`second` is another object" in incident.explanation


def test_an_optimizer_of_a_loop_is_named_by_its_place(guard: Guard) -> None:
    def body() -> None:
        models, scaler = {"g": net(), "d": net()}, scaler_of()
        opts = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        for _ in range(3):
            for o in opts.values():
                o.zero_grad()
            scaler.scale(loss_of(models["g"]) + loss_of(models["d"])).backward()
            scaler.step(opts["g"])
            o.step()
            scaler.update()

    incident = only(guard(body))
    assert (incident.cause, incident.evidence["optimizer"]) == ("bypassed-scaler", "opts['d']")


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_scheduler_by_its_own_name_from_its_first_lost_move(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of(2.0**34)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=30)
        for _ in range(25):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()
            warmup.step()

    incident = only(guard(body))
    assert (incident.cause, incident.step) == ("scheduler-on-skipped-step", 0)
    assert how(incident).endswith("if scaler.get_scale() >= scale: warmup.step()")


def test_clipped_values_have_no_norm(guard: Guard) -> None:
    def body() -> None:
        model, scaler = net(), scaler_of()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert incident.cause == "clip-before-unscale"
    assert "the norm" not in incident.explanation
    assert "the values at " in incident.explanation


def test_a_needless_scaler_is_switched_off_where_it_is_made(guard: Guard) -> None:
    def body() -> None:
        model = net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** int("7"))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            opt.zero_grad()
            scaler.scale(F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 2, (6,)))).backward()
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert incident.cause == "needless-scaler"
    assert how(incident).endswith('scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** int("7"), enabled=False)')


def test_an_optimizer_that_no_scaler_has_seen_yet_is_called_as_the_script_calls_it(guard: Guard) -> None:
    def body() -> None:
        net = nn.Linear(4, 1)
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        amp_scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(8, 4)).float().square().mean()
        amp_scaler.scale(loss).backward()
        with pytest.raises(AssertionError):
            amp_scaler.update()
        opt.zero_grad()

    incident = guard(body).first
    assert incident.cause == "missing-update"
    assert incident.fixes[0].how.endswith("amp_scaler.step(opt); amp_scaler.update()")
