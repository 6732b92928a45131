"""Norms of gradients that are still scaled: right where the scale cancels, wrong where they are used as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, fingerprint, seed_everything

from ampguard.incident import Incident

Guard = Callable[..., Watched]
SCALE, STEPS = 1024.0, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


class Loop:
    """A loop with a hole between backward and the scaler's step."""

    def __init__(self) -> None:
        seed_everything()
        self.model = Net()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        self.log: list[object] = []

    def grads(self, module: nn.Module | None = None) -> list[Tensor]:
        return [p.grad for p in (module or self.model).parameters() if p.grad is not None]

    def backward(self) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(self.model(torch.randn(5, 4)), torch.randint(0, 3, (5,)))
        self.scaler.scale(loss).backward()

    def run(self, between: Callable[[Loop], object]) -> dict[str, object]:
        for _ in range(STEPS):
            self.opt.zero_grad()
            self.backward()
            between(self)
            self.scaler.step(self.opt)
            self.scaler.update()
        return fingerprint(self.model, self.opt, self.scaler)


def number_norm(grads: Iterable[Tensor]) -> float:
    total = 0.0
    for grad in grads:
        total += grad.detach().norm(2).item() ** 2
    return total**0.5


def tensor_norm(grads: Iterable[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))


# --- healthy: the scale cancels --------------------------------------------------------------------------------------


def ratio_of_tensors(loop: Loop) -> None:
    body, head = loop.model.body.weight.grad, loop.model.head.weight.grad
    assert body is not None
    assert head is not None
    loop.log.append((body.norm() / (head.norm() + 1e-8)).item())


def ratio_of_numbers(loop: Loop) -> None:
    ratio = number_norm(loop.grads(loop.model.body)) / number_norm(loop.grads(loop.model.head))
    loop.log.append(f"{ratio:.3f}")


def ratio_of_total_norms(loop: Loop) -> None:
    a = nn.utils.get_total_norm(loop.grads(loop.model.body))
    b = nn.utils.get_total_norm(loop.grads(loop.model.head))
    loop.log.append(float(a / b))


def comparison_of_two_norms(loop: Loop) -> None:
    if tensor_norm(loop.grads(loop.model.body)) > 10 * tensor_norm(loop.grads(loop.model.head)):
        loop.log.append("body")


def comparison_of_two_numbers(loop: Loop) -> None:
    body, head = number_norm(loop.grads(loop.model.body)), number_norm(loop.grads(loop.model.head))
    if body > 10 * head:
        loop.log.append("body")


def shares_of_the_total(loop: Loop) -> None:
    norms = {name: p.grad.norm().item() for name, p in loop.model.named_parameters() if p.grad is not None}
    total = sum(norms.values())
    loop.log.append({name: norm / total for name, norm in norms.items()})


def norm_over_the_scale(loop: Loop) -> None:
    loop.log.append((tensor_norm(loop.grads()) / loop.scaler.get_scale()).item())


def norm_times_an_inverse_known_before(loop: Loop) -> None:
    inverse = 1.0 / SCALE  # what a loop has computed from get_scale() at its beginning
    true = tensor_norm(loop.grads()) * inverse
    loop.log.append(true.item())
    if true > 5.0:
        loop.log.append("large")


def number_times_an_inverse_known_before(loop: Loop) -> None:
    inverse = 1.0 / SCALE
    total = number_norm(loop.grads())
    loop.log.append(total * inverse)


def infinite_clip_over_the_scale(loop: Loop) -> None:
    scale = SCALE
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), float("inf")) / scale
    loop.log.append(f"{norm:.3f}")


def limit_times_the_scale(loop: Loop) -> None:
    limit, norm = 0.01 * loop.scaler.get_scale(), tensor_norm(loop.grads())
    if norm > limit:
        for grad in loop.grads():
            grad.mul_(limit / norm)


def torchs_clip_with_a_limit_times_the_scale(loop: Loop) -> None:
    scale = SCALE
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5 * scale)


def unscaled_by_hand_then_clipped(loop: Loop) -> None:
    """And scaled again for the scaler: two in-place factors that are the scale itself."""
    for grad in loop.grads():
        grad.mul_(1.0 / SCALE)
    norm = tensor_norm(loop.grads())
    for grad in loop.grads():
        grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        grad.mul_(SCALE)


def balance_of_two_layers(loop: Loop) -> None:
    """A factor that is a ratio of two scaled norms."""
    body, head = loop.model.body.weight.grad, loop.model.head.weight.grad
    assert body is not None
    assert head is not None
    head.mul_((body.norm() / head.norm()).clamp(max=2.0))


def cosine_with_the_last_gradient(loop: Loop) -> None:
    flat = torch.cat([g.flatten() for g in loop.grads()])
    last = loop.log[-1] if loop.log else flat
    assert isinstance(last, Tensor)
    cosine = (flat @ last / (flat.norm() * last.norm())).item()
    assert -1.1 <= cosine <= 1.1
    loop.log.append(flat.clone())


RHO = 0.05


def ascent(loop: Loop, term: Callable[[Tensor, Tensor, Tensor], Tensor], adaptive: bool = False) -> None:
    """Weights move along their gradients over the norm of all, and gradients are taken there (SAM, Foret et al. 2021)."""
    with torch.no_grad():
        held = [(p, p.grad) for p in loop.model.parameters() if p.grad is not None]
        norm = torch.norm(
            torch.stack([((torch.abs(p) if adaptive else 1.0) * grad).norm(p=2).double() for p, grad in held])
        )
        scale = RHO / (norm + 1e-12)
        for p, grad in held:
            p.add_(term(p, grad, scale))
        loop.opt.zero_grad()
    loop.backward()


def some_of(p: Tensor) -> Tensor:
    return (torch.arange(p.numel()) % 2).float().view_as(p)


def ascent_by_weights(loop: Loop) -> None:
    ascent(loop, lambda p, grad, scale: torch.pow(p, 2) * grad * scale.to(p), adaptive=True)


def ascent_in_the_weights_precision(loop: Loop) -> None:
    ascent(loop, lambda p, grad, scale: grad * scale.to(p))


def ascent_of_some_weights(loop: Loop) -> None:
    ascent(loop, lambda p, grad, scale: some_of(p) * grad * scale.type_as(p))


def ascent_of_some_weights_by_a_number(loop: Loop) -> None:
    ascent(loop, lambda p, grad, scale: some_of(p) * grad * scale.item())


def ascent_by_a_product_that_is_added(loop: Loop) -> None:
    with torch.no_grad():
        scale = RHO / tensor_norm(loop.grads())
        for p in loop.model.parameters():
            assert p.grad is not None
            p.addcmul_(some_of(p) * p.grad, scale)
        loop.opt.zero_grad()
    loop.backward()


HEALTHY = [
    ratio_of_tensors, ratio_of_numbers, ratio_of_total_norms, comparison_of_two_norms, comparison_of_two_numbers,
    shares_of_the_total, norm_over_the_scale, norm_times_an_inverse_known_before, number_times_an_inverse_known_before,
    infinite_clip_over_the_scale, limit_times_the_scale, torchs_clip_with_a_limit_times_the_scale,
    unscaled_by_hand_then_clipped, balance_of_two_layers, cosine_with_the_last_gradient,
    ascent_by_weights, ascent_in_the_weights_precision, ascent_of_some_weights, ascent_of_some_weights_by_a_number,
    ascent_by_a_product_that_is_added,
]  # fmt: skip


@pytest.mark.parametrize("between", HEALTHY)
def test_scaled_norms_that_are_used_rightly_are_no_incident(between: Callable[[Loop], None], guard: Guard) -> None:
    plain = Loop().run(between)
    run = guard(lambda: Loop().run(between))
    assert run.faults == 0, run.stderr
    assert run.causes == []
    assert run.result == plain


# --- wrong: measured -------------------------------------------------------------------------------------------------


def logged_number(loop: Loop) -> None:
    loop.log.append(f"grad norm {number_norm(loop.grads()):.2f}")


def logged_tensor(loop: Loop) -> None:
    norm = tensor_norm(loop.grads())
    loop.log.append({"grad_norm": norm.item(), "scale": loop.scaler.state_dict()["scale"]})


def total_norm_kept(loop: Loop) -> None:
    norm = nn.utils.get_total_norm(loop.grads())
    loop.log.append(float(norm))


def compared_with_a_constant(loop: Loop) -> None:
    if tensor_norm(loop.grads()) > 100.0:
        for group in loop.opt.param_groups:
            group["lr"] = 1e-3


MEASURED = [logged_number, logged_tensor, total_norm_kept, compared_with_a_constant]


@pytest.mark.parametrize("between", MEASURED)
def test_scaled_norm_that_is_used_as_it_is_costs_a_warning(between: Callable[[Loop], None], guard: Guard) -> None:
    (incident,) = guard(lambda: Loop().run(between)).report.incidents
    assert (incident.cause, incident.severity) == ("clip-before-unscale", "warning")
    assert (incident.step, incident.evidence["factor"]) == (0, SCALE)


# --- wrong: clipped --------------------------------------------------------------------------------------------------


def clipped_by_a_tensor(loop: Loop) -> None:
    norm = tensor_norm(loop.grads())
    for grad in loop.grads():
        grad.mul_(1.0 / (norm + 1e-6))  # <- here


def clipped_by_a_number(loop: Loop) -> None:
    coefficient = 1.0 / (number_norm(loop.grads()) + 1e-6)
    if coefficient < 1:
        for grad in loop.grads():
            grad.data.mul_(coefficient)  # <- here


def clipped_together(loop: Loop) -> None:
    norm = torch.stack(torch._foreach_norm(loop.grads())).norm()
    torch._foreach_mul_(loop.grads(), torch.clamp(1.0 / (norm + 1e-6), max=1.0))  # <- here


def clipped_by_assignment(loop: Loop) -> None:
    norm = tensor_norm(loop.grads())
    for p in loop.model.parameters():
        assert p.grad is not None
        p.grad = p.grad * (1.0 / norm).clamp(max=1.0)  # <- here


def clipped_by_augmented_assignment(loop: Loop) -> None:
    coefficient = min(1.0, 1.0 / (float(tensor_norm(loop.grads())) + 1e-6))
    for p in loop.model.parameters():
        p.grad *= coefficient  # <- here


CLIPPED = [
    clipped_by_a_tensor,
    clipped_by_a_number,
    clipped_together,
    clipped_by_assignment,
    clipped_by_augmented_assignment,
]


def only(run: Watched) -> Incident:
    (incident,) = run.report.incidents
    return incident


@pytest.mark.parametrize("between", CLIPPED)
def test_clip_by_hand_of_scaled_gradients_is_an_error_with_its_factor(
    between: Callable[[Loop], None], guard: Guard
) -> None:
    incident = only(guard(lambda: Loop().run(between)))
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert incident.location is not None
    assert incident.location.code.endswith("# <- here")
    evidence = incident.evidence
    assert evidence["by_hand"] is True
    assert evidence["update_too_small_by"] == pytest.approx(
        min(1.0, evidence["multiplied_by"] * SCALE) / evidence["multiplied_by"]
    )
    assert evidence["update_too_small_by"] > 10


def test_factor_is_what_the_update_really_lacks(guard: Guard) -> None:
    """The update after the wrong clip against that of the same clip on true gradients."""

    def right(loop: Loop) -> None:
        loop.scaler.unscale_(loop.opt)
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)

    def moved(between: Callable[[Loop], None]) -> Tensor:
        loop = Loop()
        before = loop.model.head.weight.detach().clone()
        loop.opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(loop.model(torch.randn(5, 4)), torch.randint(0, 3, (5,)))
        loop.scaler.scale(loss).backward()
        between(loop)
        loop.scaler.step(loop.opt)
        return (loop.model.head.weight.detach() - before).norm()

    incident = only(guard(lambda: Loop().run(clipped_by_a_tensor)))
    assert incident.evidence["update_too_small_by"] == pytest.approx(
        float(moved(right) / moved(clipped_by_a_tensor)), rel=0.05
    )


def test_limit_on_each_value_by_hand(guard: Guard) -> None:
    def limited(loop: Loop) -> None:
        for grad in loop.grads():
            grad.clamp_(-0.1, 0.1)

    incident = only(guard(lambda: Loop().run(limited)))
    assert (incident.cause, incident.severity, incident.evidence["by_hand"]) == ("clip-before-unscale", "error", True)


@pytest.mark.parametrize("knows_scale", [False, True])
def test_adaptive_clip_that_compares_with_the_weights(knows_scale: bool, guard: Guard) -> None:
    """Units whose gradient is longer than a share of their weights are overwritten: right only if the limit is scaled."""

    def adaptive(loop: Loop) -> None:
        scale = loop.scaler.get_scale() if knows_scale else 1.0
        for p in loop.model.parameters():
            grad = p.grad
            assert grad is not None
            limit = p.detach().norm().clamp(min=1e-3) * 0.01 * scale
            norm = grad.norm()
            grad.detach().copy_(torch.where(norm > limit, grad * (limit / norm), grad))

    run = guard(lambda: Loop().run(adaptive))
    assert run.faults == 0
    if knows_scale:
        assert run.causes == []
    else:
        assert (only(run).cause, only(run).severity) == ("clip-before-unscale", "error")


@pytest.mark.parametrize("where", ["scaled", "scaled by hand", "unscaled"])
def test_adaptive_clip_in_place_by_a_ratio_of_norms(where: str, guard: Guard) -> None:
    """The limit is a share of the weights' norm, which carries no scale: on scaled gradients it is far too tight."""

    def adaptive(loop: Loop) -> None:
        if where == "unscaled":
            loop.scaler.unscale_(loop.opt)
        scale = SCALE if where == "scaled by hand" else 1.0
        with torch.no_grad():
            for p in loop.model.parameters():
                assert p.grad is not None
                limit, norm = p.norm().clamp(min=1e-3) * 0.01 * scale, p.grad.norm()
                if norm > limit:
                    p.grad.mul_(limit / norm)  # <- here

    run = guard(lambda: Loop().run(adaptive))
    assert run.faults == 0
    if where != "scaled":
        assert run.causes == []
        return
    incident = only(run)
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert incident.location is not None
    assert incident.location.code == "p.grad.mul_(limit / norm)  # <- here"
    assert 1.0 < incident.evidence["update_too_small_by"] <= SCALE
    assert "p.grad.mul_" not in incident.fixes[0].how  # in a loop over the parameters: no place for unscale_


@pytest.mark.parametrize("multiplies_back", [False, True])
@pytest.mark.parametrize("by_value", [False, True])
def test_division_by_hand_is_seen_behind_a_clip(by_value: bool, multiplies_back: bool, guard: Guard) -> None:
    """Divided by the script, clipped, and divided by the scaler again; right only if multiplied back before that."""

    def between(loop: Loop) -> None:
        for grad in loop.grads():
            grad.div_(loop.scaler.get_scale())  # <- by hand
        if by_value:
            nn.utils.clip_grad_value_(loop.model.parameters(), 0.05)
        else:
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)
        if multiplies_back:
            for grad in loop.grads():
                grad.mul_(loop.scaler.get_scale())

    run = guard(lambda: Loop().run(between))
    assert run.faults == 0
    if multiplies_back:
        assert run.causes == []
        return
    incident = only(run)
    assert (incident.cause, incident.severity, incident.step) == ("double-unscale", "error", 0)
    assert incident.evidence["factor"] == pytest.approx(1 / SCALE)
    assert incident.location is not None
    assert incident.location.code == "grad.div_(loop.scaler.get_scale())  # <- by hand"


@pytest.mark.parametrize(
    ("hook", "is_told"),
    [
        (lambda g: g.clamp(-0.05, 0.05), True),  # <- the recipe for clipping by value
        (lambda g: g.clamp(-0.05 * SCALE, 0.05 * SCALE), False),
        (lambda g: g * 0.1, False),
        (lambda g: -g, False),
        (lambda g: g.nan_to_num(0.0), False),
        (lambda g: g.clamp(min=0), False),
        (lambda g: None, False),
    ],
)
def test_hooks_on_parameters_that_clip(hook: Callable[[Tensor], Tensor | None], is_told: bool, guard: Guard) -> None:
    """They run inside the backward pass, before anybody can unscale. The hooks themselves stay as they were."""
    order: list[int] = []

    def body() -> dict[str, object]:
        loop = Loop()
        order.clear()
        for p in loop.model.parameters():
            p.register_hook(lambda g: order.append(1))
            p.register_hook(hook)
        result = loop.run(lambda _: None)
        for p in loop.model.parameters():
            hooks = list(p._backward_hooks.values())
            assert len(hooks) == 2
            assert hooks[1] is hook
        return result

    run = guard(body)
    assert run.faults == 0
    assert len(order) == STEPS * 4
    assert body() == run.result, "watching has changed something"
    if not is_told:
        assert run.causes == []
        return
    incident = only(run)
    assert (incident.cause, incident.severity, incident.step) == ("clip-before-unscale", "error", 0)
    assert incident.evidence["limit_in_hook"] == pytest.approx(0.05)
    assert incident.location is not None
    assert incident.location.code.endswith("# <- the recipe for clipping by value")
    assert "clip_grad_value_(parameters, 0.05)" in incident.fixes[0].how
