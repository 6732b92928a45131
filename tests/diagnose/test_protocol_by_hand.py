"""What scripts do to gradients by themselves: divide, add, clip in hooks, scale without a scaler. Each with a healthy twin."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ampguard.incident import Incident

Guard = Callable[..., Any]
SCALE = 1024.0


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(torch.randn(6, 4))
    return F.cross_entropy(logits.float(), torch.randint(0, 3, (6,)))


def new_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def only(run: Any) -> Incident:
    assert run.faults == 0, run.stderr
    (incident,) = [i for i in run.report.incidents if i.severity != "info"]
    return incident  # type: ignore[no-any-return]


def is_silent(run: Any) -> bool:
    assert run.faults == 0, run.stderr
    return [i for i in run.report.incidents if i.severity != "info"] == []


# --- a window whose gradients the script divides -------------------------------------------------------------------------


def window(divides_each: bool, by_scaler: bool = False) -> Callable[[], None]:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for micro in range(12):
            scaler.scale(loss_of(model) / 4).backward()
            is_last = micro % 4 == 3
            if divides_each or (is_last and not by_scaler):
                inverse = 1.0 / scaler.get_scale()
                for p in model.parameters():
                    p.grad.mul_(inverse)  # type: ignore[union-attr]
            if is_last:
                if by_scaler:
                    scaler.step(opt)
                    scaler.update()
                else:
                    opt.step()
                opt.zero_grad()

    return body


@pytest.mark.parametrize("by_scaler", [False, True])
def test_a_division_by_hand_after_every_micro_batch(by_scaler: bool, guard: Guard) -> None:
    incident = only(guard(window(divides_each=True, by_scaler=by_scaler)))
    assert (incident.cause, incident.step) == ("accumulation-broken", 0)
    assert incident.location is not None
    assert incident.location.code.startswith("p.grad.mul_(inverse)")


def test_one_division_by_hand_at_the_end_of_the_window(guard: Guard) -> None:
    assert is_silent(guard(window(divides_each=False)))


# --- gradients of another loss, added ------------------------------------------------------------------------------------


def test_a_division_by_hand_that_is_clipped_stays_known_between_close_looks(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.NAdam(model.parameters(), lr=1e-3)
        for _ in range(12):
            scaler.scale(loss_of(model)).backward()
            inverse = 1.0 / scaler.get_scale()
            for p in model.parameters():
                p.grad.mul_(inverse)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

    assert is_silent(guard(body))


def test_a_division_by_the_attribute_in_which_the_scaler_keeps_its_scale(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            for p in model.parameters():
                p.grad.div_(scaler._scale)
            scaler.step(opt)
            scaler.update()

    assert only(guard(body)).cause == "double-unscale"


def test_a_division_by_a_scale_that_was_read_before(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.NAdam(model.parameters(), lr=1e-3)
        for _ in range(12):
            inverse = 1.0 / scaler.get_scale()
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            for p in model.parameters():
                p.grad.mul_(inverse)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()

    assert is_silent(guard(body))


def with_penalty(scaled: bool, in_place: bool) -> Callable[[], None]:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        some = list(model[0].parameters())
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            penalty = sum((p.square().sum() for p in some), torch.zeros(()))
            added = torch.autograd.grad(scaler.scale(penalty) if scaled else penalty, some)
            for p, g in zip(some, added, strict=True):
                if in_place:
                    p.grad += g  # type: ignore[operator]
                else:
                    p.grad = p.grad + g  # type: ignore[operator]
            scaler.step(opt)
            scaler.update()

    return body


@pytest.mark.parametrize("in_place", [False, True])
def test_unscaled_gradients_that_are_added(in_place: bool, guard: Guard) -> None:
    incident = only(guard(with_penalty(scaled=False, in_place=in_place)))
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("unscaled-backward", 0, 1 / SCALE)
    assert incident.location is not None
    assert "torch.autograd.grad(" in incident.location.code
    assert "torch.autograd.grad(scaler.scale(" in incident.fixes[0].how


@pytest.mark.parametrize("in_place", [False, True])
def test_scaled_gradients_that_are_added(in_place: bool, guard: Guard) -> None:
    assert is_silent(guard(with_penalty(scaled=True, in_place=in_place)))


def test_gradients_that_are_taken_and_not_added(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        norms = []
        for _ in range(4):
            opt.zero_grad()
            loss = loss_of(model)
            scaler.scale(loss).backward(retain_graph=True)
            norms.append(torch.autograd.grad(loss, list(model.parameters()))[0].norm().item())
            scaler.step(opt)
            scaler.update()

    assert is_silent(guard(body))


# --- hooks that clip -----------------------------------------------------------------------------------------------------


def hooked(limit: float, behind: bool, by_norm: bool) -> Callable[[], None]:
    def shrunk(g: Tensor) -> Tensor:
        return g * (limit / g.norm()).clamp(max=1.0) if by_norm else g * 0.5

    def complete(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.copy_(shrunk(p.grad))

    def body() -> None:
        model, scaler = Net(), new_scaler()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(complete) if behind else p.register_hook(shrunk)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    return body


@pytest.mark.parametrize("behind", [False, True])
def test_a_hook_that_clips_the_norm_of_scaled_gradients(behind: bool, guard: Guard) -> None:
    incident = only(guard(hooked(0.05, behind, by_norm=True)))
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert incident.evidence["limit_in_hook"] == pytest.approx(0.05, rel=1e-3)
    assert incident.location is not None
    assert incident.location.code.startswith("def complete" if behind else "def shrunk")
    assert "the norm of each parameter's gradient" in incident.explanation
    assert "clip_grad_norm_(p, 0.05)" in incident.fixes[0].how


def by_weights(share: float, start: int = 0) -> Callable[[], None]:
    """Adaptive gradient clipping in a hook, from iteration `start` on; the zeros among the weights have a limit of their own."""

    @torch.no_grad()
    def adaptive(p: Tensor) -> None:
        assert p.grad is not None
        size = lambda t: t.norm() if t.dim() < 2 else t.norm(dim=1, keepdim=True)  # noqa: E731
        p.grad.mul_((share * size(p).clamp(min=1e-3) / size(p.grad).clamp(min=1e-6)).clamp(max=1.0))

    def body() -> None:
        model, scaler = Net(), new_scaler()
        nn.init.zeros_(list(model.parameters())[-1])
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            if step == start:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(adaptive)
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    return body


@pytest.mark.parametrize("start", [0, 2])
def test_a_hook_that_clips_scaled_gradients_by_their_weights(start: int, guard: Guard) -> None:
    incident = only(guard(by_weights(0.02, start)))
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", start)
    assert incident.evidence["limit_in_hook"] == pytest.approx(0.02, rel=1e-3)
    assert incident.location is not None
    assert incident.location.function == "adaptive"
    assert "0.02 of theirs" in incident.explanation


def test_a_hook_that_would_clip_by_weights_and_has_nothing_to_do(guard: Guard) -> None:
    assert is_silent(guard(by_weights(1e9)))


@pytest.mark.parametrize("behind", [False, True])
def test_a_hook_that_halves_all_gradients_is_no_clipping(behind: bool, guard: Guard) -> None:
    assert is_silent(guard(hooked(0.05, behind, by_norm=False)))


@pytest.mark.parametrize("behind", [False, True])
def test_a_limit_that_knows_the_scale(behind: bool, guard: Guard) -> None:
    assert is_silent(guard(hooked(0.05 * SCALE, behind, by_norm=True)))


def test_a_hook_that_runs_no_code_of_the_scripts_is_placed_where_it_was_put(guard: Guard) -> None:
    def body() -> None:
        model, scaler = Net(), new_scaler()
        for p in model.parameters():
            p.register_hook(functools.partial(torch.clamp, min=-0.5, max=0.5))  # <- here
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert incident.cause == "clip-before-unscale"
    assert incident.location is not None
    assert incident.location.code.endswith("# <- here")


def test_rows_that_are_clipped_one_by_one(guard: Guard) -> None:
    """Adaptive clipping: the gradient of each row stays below a share of the row's norm."""

    def body() -> None:
        model, scaler = Net(), new_scaler()
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(4):
            opt.zero_grad()
            scaler.scale(loss_of(model)).backward()
            for p in (p for p in model.parameters() if p.ndim == 2):
                assert p.grad is not None
                limit = 0.5 * p.detach().norm(dim=1, keepdim=True)
                p.grad.mul_((limit / p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0))
            scaler.step(opt)
            scaler.update()

    incident = only(guard(body))
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert 10 < incident.evidence["update_too_small_by"] <= SCALE


# --- a scale of the script's own -----------------------------------------------------------------------------------------


def own_scale(order: str, limit: float = 0.05, divides: bool = True) -> Callable[[], None]:
    def body() -> None:
        model = Net()
        weights = list(model.parameters())
        opt = torch.optim.SGD(weights, lr=0.05)

        def divide() -> None:
            for p in weights if divides else ():
                assert p.grad is not None
                p.grad.data = p.grad.data / SCALE

        def clip() -> None:
            nn.utils.clip_grad_norm_(weights, limit)  # limited

        for _ in range(4):
            opt.zero_grad()
            (loss_of(model) * SCALE).backward()
            for call in (clip, divide) if order == "clip first" else (divide, clip):
                call()
            opt.step()

    return body


def test_clipping_before_the_script_divides_by_its_own_scale(guard: Guard) -> None:
    incident = only(guard(own_scale("clip first")))
    assert (incident.cause, incident.step, incident.evidence["factor"]) == ("clip-before-unscale", 0, SCALE)
    assert incident.location is not None
    assert incident.location.code == "nn.utils.clip_grad_norm_(weights, limit)  # limited"
    assert "divide the gradients by the loss scale 1024 first" in incident.fixes[0].how


@pytest.mark.parametrize(
    "body",
    [
        own_scale("divide first"),
        own_scale("clip first", limit=0.05 * SCALE),
        own_scale("clip first", divides=False),  # a loss that is 1024 times something: nothing says that it is a scale
        own_scale("clip first", limit=1e9),
    ],
    ids=["divided first", "limit times scale", "never divided", "nothing to clip"],
)
def test_own_scales_that_are_used_rightly(body: Callable[[], None], guard: Guard) -> None:
    assert is_silent(guard(body))
