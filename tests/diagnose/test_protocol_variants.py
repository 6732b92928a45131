"""Protocol faults in the style of other loops: told by the right cause, at the right line, with a fix that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ampguard.incident import Incident
from ampguard.report.history import read_history

Guard = Callable[..., Any]
RHO = 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def loss_of(model: nn.Module, dtype: torch.dtype = torch.float16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        return F.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,)))


def new_scaler(scale: float = 256.0, **options: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def only(run: Any) -> Incident:
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    return incident  # type: ignore[no-any-return]


# --- sharpness-aware minimisation ------------------------------------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """As its reference implementation has it: an optimizer around another that shares its groups."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": RHO, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.old: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def first_step(self) -> None:
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            self.old[p] = p.detach().clone()
            p.data.add_(p.grad * (RHO / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, old in self.old.items():
            p.data = old
        self.base_optimizer.step()
        self.zero_grad()


def sam_loop(unscales_first: bool, updates_between: bool, steps: int = 4) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model, scaler = Net(), new_scaler()
        opt = SAM(model.parameters(), torch.optim.SGD, lr=0.05)
        for _ in range(steps):
            scaler.scale(loss_of(model)).backward()
            if unscales_first:
                scaler.unscale_(opt)
            opt.first_step()
            if updates_between:
                scaler.update()
            scaler.scale(loss_of(model)).backward()
            scaler.unscale_(opt)  # the second pass
            opt.second_step()
            scaler.update()

    return body


def test_second_unscale_of_one_sam_iteration(guard: Guard) -> None:
    def body() -> None:
        with pytest.raises(RuntimeError, match="already been called"):
            sam_loop(unscales_first=True, updates_between=False)()

    incident = only(guard(body))
    assert (incident.cause, incident.step) == ("double-unscale", 0)
    assert incident.location is not None
    assert incident.location.code == "scaler.unscale_(opt)  # the second pass"
    assert incident.evidence["second_pass"] is True
    assert incident.evidence["first"]["code"] == "scaler.unscale_(opt)"
    assert "next iteration" not in incident.explanation
    assert "scaler.update() after the first pass" in incident.fixes[0].how


@pytest.mark.parametrize(("unscales_first", "updates_between"), [(True, True), (False, False)])
def test_healthy_sam_is_silent(unscales_first: bool, updates_between: bool, guard: Guard) -> None:
    run = guard(sam_loop(unscales_first, updates_between, steps=8))
    assert (run.faults, run.causes) == (0, [])


def test_continue_past_update_is_still_the_next_iteration(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            try:
                scaler.unscale_(opt)
            except RuntimeError:
                return
            if step == 1:
                continue
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert (incident.cause, incident.evidence["next_iteration"]) == ("missing-update", True)


# --- two scalers, broken windows ---------------------------------------------------------------------------------------


def test_loss_of_one_scaler_stepped_by_another(guard: Guard) -> None:
    def body() -> None:
        maker, critic = Net(), Net()
        opt_m, opt_c = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (maker, critic))
        scaler_m, scaler_c = new_scaler(256.0), new_scaler(1024.0)
        for _ in range(4):
            opt_c.zero_grad(), opt_m.zero_grad()
            scaler_c.scale(loss_of(critic)).backward()
            scaler_c.step(opt_c)
            scaler_c.update()
            scaler_m.scale(loss_of(maker)).backward()
            scaler_c.step(opt_m)
            scaler_c.update()

    incident = only(guard(body))
    assert (incident.cause, incident.evidence["factor"]) == ("unscaled-backward", 0.25)
    assert "`scaler_m` has multiplied it by 256" in incident.explanation
    assert "scaler_m.step(opt_m); scaler_m.update()" in incident.fixes[0].how


def test_clip_in_a_broken_window_is_not_told_twice(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            opt.zero_grad()
            scaler.scale(loss_of(model) / 2).backward()
            scaler.unscale_(opt)
            scaler.scale(loss_of(model) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert (incident.cause, incident.occurrences) == ("accumulation-broken", 3)
    assert "unscaled at test_protocol_variants.py" in incident.explanation
    assert incident.evidence["first"]["code"] == "scaler.unscale_(opt)"


# --- a scaler that does nothing ----------------------------------------------------------------------------------------


def bf16_loop(steps: int, fails_to: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def body() -> None:
        model, scaler = Net(), new_scaler(1024.0, growth_interval=4)
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(steps):
            opt.zero_grad()
            scaler.scale(loss_of(model, torch.bfloat16 if step < 5 else fails_to)).backward()
            scaler.step(opt)
            scaler.update()

    return body


def test_needless_scaler_states_its_numbers(guard: Guard) -> None:
    incident = only(guard(bf16_loop(20)))
    evidence = incident.evidence
    assert (incident.cause, incident.step, incident.dtype) == ("needless-scaler", 0, "bfloat16")
    assert (evidence["steps"], evidence["autocast_regions"]) == (16, {"bfloat16": 16})
    assert (evidence["float16_regions"], evidence["skipped"]) == (0, 0)
    assert (evidence["first_scale"], evidence["scale"]) == (1024.0, 8192.0)
    assert evidence["parameter_dtypes"] == {"float32": 4}
    assert "16 times in bfloat16, never in float16" in incident.explanation
    assert "went from 1024 to 8192, without effect" in incident.explanation


def test_scaler_that_is_needed_later_is_not_needless(guard: Guard) -> None:
    """Some steps of warm-up in bfloat16, then float16."""
    assert guard(bf16_loop(20, fails_to=torch.float16)).causes == []


# --- the history -------------------------------------------------------------------------------------------------------


def test_breaches_are_among_the_events_of_the_history(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()

    run = guard(body)
    incident = only(run)
    with read_history(run.session.path) as history:
        events = [e for e in history.events() if e.kind == "clip-before-unscale"]
    assert [(e.step, e.detail) for e in events] == [(0, incident.explanation)]


@pytest.mark.parametrize("scales", [True, False])
def test_a_graph_that_is_cut_in_two(scales: bool, guard: Guard) -> None:
    """What the first backward pass gave for the representations goes on through the encoder: it carries what that carried."""

    def body() -> None:
        torch.manual_seed(0)
        encoder, head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 2)
        opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.zeros(()))
        for _ in range(5):
            opt.zero_grad()
            x = torch.randn(16, 6)
            with torch.autocast("cpu", dtype=torch.float16):
                cached = encoder(x).detach().requires_grad_()
                loss = head(cached).square().mean()
            (scaler.scale(loss) if scales else loss).backward()
            for rows, gradient in zip(x.split(8), cached.grad.split(8), strict=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    again = encoder(rows)
                again.backward(gradient)
            scaler.step(opt)
            scaler.update()

    causes = guard(body).causes
    assert causes == ([] if scales else ["unscaled-backward"])


def test_an_optimizer_that_is_given_master_copies_after_it_was_made(guard: Guard) -> None:
    """As Apex's FP16_Optimizer: the groups of the optimizer are given float32 copies, and their gradients are set by hand."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).half()
        opt = torch.optim.SGD(model.parameters(), lr=1e-2)
        pairs = [(p, nn.Parameter(p.detach().float())) for p in model.parameters()]
        opt.param_groups[0]["params"] = [master for _, master in pairs]
        for _ in range(12):
            x = torch.randn(16, 6).half()
            model.zero_grad()
            (model(x).float().square().mean() * 64.0).backward()
            for p, master in pairs:
                assert p.grad is not None
                master.grad = p.grad.float()
                master.grad.data.mul_(1 / 64.0)
            opt.step()
            for p, master in pairs:
                p.data.copy_(master.data)

    assert guard(body).causes == []


# --- a scaler of the script's own --------------------------------------------------------------------------------------


class LeavesItToTheLoop(torch.amp.GradScaler):
    """Its `unscale_` does nothing, and so `step` finds no checks."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def test_gradients_that_no_check_was_made_of_are_there(guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = LeavesItToTheLoop("cpu", init_scale=256.0)
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.step(optimizer)

    assert only(guard(body)).cause == "clip-before-unscale"
