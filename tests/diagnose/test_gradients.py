"""Bad gradients are explained from numbers: functions at their singular points, values that the loss never sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched, seed_everything

from ampguard.diagnose.causes.singular_gradient import _has_equal_values
from ampguard.incident import Incident

Guard = Callable[..., Watched]
half, bf16 = torch.float16, torch.bfloat16


class Computes(nn.Module):
    """A module around one function of what a linear layer gives: the layer makes its input's own numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.same = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.same.weight)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.same(x.unsqueeze(-1)).squeeze(-1))


def step(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Callable[[], float]:
    """One step without a scaler. Returns the loss."""

    def body() -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", dtype=dtype or half, enabled=dtype is not None):
            out = model(x)
        loss = out.float().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return body


# --- functions at their singular points --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A function, the operator whose derivative is bad, an x at which it is, and whether a value there is hidden."""

    derivative_of: str
    function: Callable[[Tensor], Tensor]
    x: list[float]
    hidden: bool = False


ZERO, ONE = torch.zeros(()), torch.ones(())

CASES: dict[str, Case] = {
    "root": Case("sqrt", lambda x: x.sqrt(), [0.0, 1.0]),
    "norm by hand": Case("sqrt", lambda x: x.pow(2).sum().sqrt(), [0.0, 0.0]),
    "norms of rows": Case("sqrt", lambda x: x.view(2, 2).pow(2).sum(-1).sqrt(), [0.0, 0.0, 1.0, 2.0]),
    "distances by hand": Case("sqrt", lambda x: (x[:, None] - x[None]).pow(2).sqrt(), [1.0, 2.0]),
    "deviation by hand": Case("sqrt", lambda x: x.var().sqrt(), [2.0, 2.0]),
    "root of a product": Case("sqrt", lambda x: x.prod().sqrt(), [0.0, 1.0]),
    "root of a magnitude": Case("sqrt", lambda x: torch.complex(x[:1], x[1:]).abs().sqrt(), [0.0, 0.0]),
    "power of a half": Case("pow", lambda x: x**0.5, [0.0, 1.0]),
    "power of a third": Case("pow", lambda x: x.sign() * x.abs().pow(1 / 3), [0.0, 1.0]),
    "tensor of powers": Case("pow", lambda x: torch.pow(x, torch.tensor([0.5, 2.0])), [0.0, 1.0]),
    "p-norm by hand": Case("pow", lambda x: x.abs().pow(3).sum().pow(1 / 3), [0.0, 0.0]),
    "acos at 1": Case("acos", lambda x: x.acos(), [1.0, 0.5]),
    "acos, clamped to 1": Case("acos", lambda x: x.clamp(-1, 1).acos(), [1.0, 0.5]),
    "asin at -1": Case("asin", lambda x: x.asin(), [-1.0, 0.5]),
    "acosh at 1": Case("acosh", lambda x: x.acosh(), [1.0, 2.0]),
    "hypot at 0": Case("hypot", lambda x: torch.hypot(x[:1], x[1:]), [0.0, 0.0]),
    "equal eigenvalues": Case("linalg_eigh", lambda x: torch.linalg.eigh(torch.diag(x))[1].pow(3).sum(), [1.0, 1.0]),
    "equal singular values": Case("linalg_svd", lambda x: torch.linalg.svd(torch.diag(x))[0].pow(3).sum(), [1.0, 1.0]),
    "x log x": Case("xlogy", lambda x: torch.xlogy(x, x), [0.0, 2.0]),
    # the function itself is not finite there, and its derivative begins it
    "log in a where": Case("log", lambda x: torch.where(x > 0, x.log(), ZERO), [0.0, 2.0]),
    "log in masked_fill": Case("log", lambda x: x.log().masked_fill(x <= 0, 0.0), [0.0, 2.0]),
    "log of a selection": Case("log", lambda x: x.log()[x > 0], [0.0, 2.0]),
    "log behind nan_to_num": Case("log", lambda x: torch.nan_to_num(x.log(), neginf=0.0), [0.0, 2.0]),
    "log behind relu": Case("log", lambda x: x.log().relu(), [0.0, 2.0]),
    "log behind logsumexp": Case("log", lambda x: torch.logsumexp(x.log(), 0), [0.0, 1.0]),
    "log of what a sigmoid leaves": Case("log", lambda x: torch.where(x < 50, (1 - x.sigmoid()).log(), -x), [100.0, 1.0]),
    "log1p behind clamp": Case("log1p", lambda x: torch.log1p(-torch.exp(-x)).clamp(min=-5), [0.0, 1.0]),
    "root behind clamp": Case("sqrt", lambda x: x.sqrt().clamp(min=1.0), [0.0, 2.0]),
    "root behind maximum": Case("sqrt", lambda x: torch.maximum(x.sqrt(), ONE), [0.0, 2.0]),
    "quotient in a where": Case("div", lambda x: torch.where(x != 0, x.sin() / x, ONE), [0.0, 2.0]),
    "quotient behind nan_to_num": Case("div", lambda x: torch.nan_to_num(x / x), [0.0, 2.0]),
    "erfinv in a where": Case("erfinv", lambda x: torch.where(x.abs() < 1, x.erfinv(), ZERO), [1.0, 0.5]),
    "atanh in a where": Case("atanh", lambda x: torch.where(x.abs() < 1, x.atanh(), ZERO), [1.0, 0.5]),
    # a value that the loss never sees, multiplied by 0 in the derivative
    "root of a negative number in a where": Case("sqrt", lambda x: torch.where(x > 0, x.sqrt(), x), [-1.0, 2.0], True),
    "exponential behind clamp": Case("exp", lambda x: x.exp().clamp(max=10.0), [100.0, 1.0], True),
    "exponential behind minimum": Case("exp", lambda x: torch.minimum(x.exp(), 5 * ONE), [100.0, 1.0], True),
    "reciprocal in a where": Case("reciprocal", lambda x: torch.where(x > 0, 1 / x, x), [0.0, 1.0], True),
    "entropy behind nansum": Case("log", lambda x: -(x * x.log()).nansum(), [0.0, 2.0], True),
    "ratio of a policy": Case(
        "exp", lambda x: torch.minimum(x.exp(), x.exp().clamp(0.8, 1.2)) * torch.tensor([0.0, 1.0]), [200.0, 0.1], True
    ),
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    """Those whose gradient this PyTorch makes bad (since 2.15 clamp passes nothing on at its bounds)."""
    chosen = CASES[request.param]
    seed_everything()
    model = Computes(chosen.function)
    step(model, torch.tensor(chosen.x))()
    if model.same.weight.isfinite().all():
        pytest.skip("this version of PyTorch makes a finite gradient here")
    return chosen


def backward_incidents(run: Watched) -> list[Incident]:
    return [incident for incident in run.report.incidents if incident.phase == "backward"]


def test_values_that_a_rounding_has_made_equal_are_a_singular_point(guard: Guard) -> None:
    """Beneath bfloat16 layers; the same layers in float32 leave them apart, and the derivative is as it is."""

    def spectrum(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.linalg.eigh(torch.diag(x.float()))[1].pow(3).sum()

    seed_everything()
    run = guard(step(Computes(spectrum), torch.tensor([1.0, 1.001]), torch.bfloat16))
    (incident,) = backward_incidents(run)
    assert (incident.cause, incident.dtype) == ("singular-gradient", "float32"), incident
    assert "two of its values are equal" in incident.explanation
    assert "torch.linalg.eigh" in incident.location.code
    assert incident.fixes[0].verified


@pytest.mark.parametrize(
    ("values", "name", "are_equal"),
    [
        ([1.0, 1.0, 3.0], "_linalg_eigh", True),
        ([1.0, 2.0, 3.0], "_linalg_eigh", False),
        ([1.0, 1.0 + 1e-5, 3.0], "_linalg_eigh", False),
        ([2.0, 2.0, 3.0], "_linalg_svd", True),
        ([2.0, -2.5, 3.0], "_linalg_svd", False),
        ([2.0, 2.0, 3.0], "linalg_eig", True),
        ([2.0, 2.5, 3.0], "linalg_eig", False),
    ],
)
def test_the_numbers_tell_whether_values_are_equal(values: list[float], name: str, are_equal: bool) -> None:
    matrices = torch.stack([torch.diag(torch.tensor([5.0, 6.0, 7.0])), torch.diag(torch.tensor(values))])
    assert _has_equal_values(matrices, name) is are_equal


def test_singular_gradient(case: Case, guard: Guard) -> None:
    seed_everything()
    model = Computes(case.function)

    run = guard(step(model, torch.tensor(case.x)))

    assert math.isfinite(run.result), "the loss must look healthy for this test to mean anything"
    assert not model.same.weight.isfinite().all(), "and the gradient must not"
    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.phase, first.severity) == ("singular-gradient", "backward", "error"), first.explanation
    assert first.evidence["derivative_of"].split(".")[1].lstrip("_") == case.derivative_of
    assert bool(first.evidence.get("hidden")) == case.hidden
    assert first.module == ""
    assert first.location is not None
    assert (first.location.file, first.location.function) == (__file__, "<lambda>")
    assert first.location.line in lines_of(case.function)
    assert first.evidence["rung"] == "replay"
    assert first.evidence["parameters"] == {
        "nonfinite": ["same.weight"], "nonfinite_count": 1, "finite": [], "finite_count": 0,
    }  # fmt: skip
    assert len(run.report.incidents) == 1


def lines_of(function: Callable[..., Any]) -> set[int]:
    return {line for _, _, line in function.__code__.co_lines() if line is not None}


def test_softmax_row_without_a_key_that_the_loss_does_not_see(guard: Guard) -> None:
    mask = torch.tensor([[-math.inf, 0.0], [-math.inf, -math.inf]])
    model = Computes(lambda x: (x[:, None] * x + mask).softmax(-1)[0] * x)
    first = guard(step(model, torch.tensor([1.0, 2.0]))).first
    assert (first.cause, first.evidence["hidden"]) == ("singular-gradient", True)
    assert "1 of its 2 rows are -Inf throughout" in first.explanation
    assert [(fix.action, fix.verified) for fix in first.fixes] == [("fix-mask", True), ("mask-value", True)]


def test_some_fix_is_verified(case: Case, guard: Guard) -> None:
    fixes = guard(step(Computes(case.function), torch.tensor(case.x))).first.fixes
    assert any(fix.verified for fix in fixes), fixes
    order = [{True: 0, None: 1, False: 2}[fix.verified] for fix in fixes]
    assert order == sorted(order), "what was seen to work comes first"


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.hidden])
def test_fix_of_a_hidden_value_keeps_the_loss(name: str, guard: Guard) -> None:
    """What the loss never saw cannot change it: a fix that does is none."""
    case = CASES[name]
    run = guard(step(Computes(case.function), torch.tensor(case.x)))
    verified = [fix for fix in run.first.fixes if fix.verified]
    assert verified
    for fix in verified:
        assert fix.outcome is not None
        assert fix.outcome.endswith(f"the loss is {run.result:.4g}")


INNOCENT: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "norm": (lambda x: x.norm(), [0.0, 0.0]),
    "vector norm": (lambda x: torch.linalg.vector_norm(x), [0.0, 0.0]),
    "deviation": (lambda x: x.std(), [2.0, 2.0]),
    "distances": (lambda x: torch.cdist(x[:, None], x[:, None]), [1.0, 1.0]),
    "eigenvalues": (lambda x: torch.linalg.eigvalsh(torch.diag(x)), [1.0, 1.0]),
    "relu before a root": (lambda x: x + (x - 5).relu().sqrt().detach() + (x - 5).relu(), [1.0, 2.0]),
    "Inf that relu's zero cuts": (lambda x: x + ((x - 5).relu() + 0).sqrt().sum() * 0 + x, [9.0, 7.0]),
    "safe where": (lambda x: torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), ZERO), [0.0, 2.0]),
    "huge and finite": (lambda x: F.normalize(x, dim=0), [0.0, 0.0]),
    "saturated": (lambda x: F.binary_cross_entropy(x, torch.tensor([0.0, 1.0])), [1.0, 1.0]),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_finite_gradient_is_no_incident(name: str, guard: Guard) -> None:
    function, x = INNOCENT[name]
    model = Computes(function)

    run = guard(step(model, torch.tensor(x)))

    assert model.same.weight.isfinite().all()
    assert run.faults == 0
    assert run.report.incidents == ()


def test_infinite_gradient_that_relu_cuts_is_no_incident(guard: Guard) -> None:
    """The root's derivative at 0 is infinite; relu's derivative there is 0, and PyTorch masks instead of multiplying."""
    model = nn.Linear(4, 4)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.ones(2, 4))
        root = (out - 1e3).relu().sqrt()
        root.register_hook(lambda gradient: seen.append(gradient))
        (out.mean() + root.sum()).backward()
        optimizer.step()

    seen: list[Tensor] = []
    run = guard(body)
    assert seen
    assert model.weight.isfinite().all()
    assert run.report.incidents == ()


# --- in low precision, with and without a scaler -----------------------------------------------------------------------


def scaled_steps(
    model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int, **options: Any
) -> Callable[[], float]:
    """Steps with a scaler. Returns its last scale."""

    def body() -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
        scaler = torch.amp.GradScaler("cpu", **options)
        for number in range(steps):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    return body


@pytest.mark.parametrize("options", [{"init_scale": 512.0}, {"enabled": False}], ids=["scaler", "disabled scaler"])
@pytest.mark.parametrize("name", ["norms of rows", "log in a where", "root of a negative number in a where"])
def test_singular_in_any_precision(name: str, options: dict[str, Any], guard: Guard) -> None:
    """In float16 as in float32, at a loss scale of 1 as at 512: the precision has no part in it."""
    case = CASES[name]
    model = Computes(case.function)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        with torch.autocast("cpu", dtype=half):
            out = model(
                torch.tensor(case.x) if number == 2 else torch.ones(len(case.x)) / 2 + torch.arange(len(case.x))
            )
        return out.float().mean()

    run = guard(scaled_steps(model, loss_of, 3, **options))

    assert run.faults == 0, run.stderr
    (first,) = backward_incidents(run)
    assert (first.cause, first.step, first.severity) == ("singular-gradient", 2, "error"), first.explanation
    assert first.evidence["derivative_of"].split(".")[1] == case.derivative_of
    assert any(fix.verified for fix in first.fixes)


class Mlp(nn.Module):
    def __init__(self, out: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(1))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 16), nn.Linear(16, 5)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.unsqueeze(-1))).mean(1))


X, Y = torch.linspace(-2, 2, 24).reshape(6, 4), torch.arange(30.0).reshape(6, 5)
CRITERIA: dict[str, Callable[[nn.Module], Tensor]] = {}


def criterion(function: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    CRITERIA[function.__name__.replace("_", " ")] = function
    return function


@criterion
def float32_loss(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=half):
        return F.mse_loss(model(X), Y * 10)


@criterion
def half_loss_inside(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=half):
        return (model(X) - 1).abs().mean()


@criterion
def half_loss_outside(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=half):
        out = model(X)
    return F.cross_entropy(out, torch.arange(6) % 5)


@pytest.mark.parametrize("make", [Mlp, Convolutional, Attends])
@pytest.mark.parametrize("name", CRITERIA)
def test_scaler_that_settles_is_normal(name: str, make: Callable[[], nn.Module], guard: Guard) -> None:
    """The scale at which the scaler really ends is the one that the first incident foretells."""
    seed_everything()
    model = make()

    run = guard(scaled_steps(model, lambda m, _: CRITERIA[name](m), 16, init_scale=2.0**20))

    assert run.result < 2.0**20, "steps must have been skipped"
    assert run.faults == 0, run.stderr
    assert run.report.status == "clean"
    (only,) = run.report.incidents
    assert (only.cause, only.severity, only.step) == ("loss-scale-overflow", "info", 0)
    assert only.evidence["finite_at_scale"] == run.result
    assert only.occurrences == 20 - math.log2(run.result)
    assert only.evidence["loss_scale"] == 2.0**20
    assert only.evidence["max_abs_gradient"] < 65504
    assert {fix.action: fix.verified for fix in only.fixes} == {"lower-loss-scale": True, "wait": None}
    assert (half_text in only.explanation) == (name != "float32 loss")


half_text = "The loss itself is float16"


class Unit(nn.Module):
    """Normalizes very short vectors: the derivative is their reciprocal length."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.normalize(self.project(x) * 1e-6, dim=-1))


def unit_loss(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", dtype=half):
        return F.mse_loss(model(X), Y)


class Probability(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sigmoid()


def saturated_loss(model: nn.Module, number: int) -> Tensor:
    with torch.autocast("cpu", dtype=half):
        out = model(X * (60.0 if number == 1 else 1.0))
    return F.binary_cross_entropy(out.float(), torch.ones(6, 5))


OVERFLOWS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor], int, str | None]] = {
    "normalize": (Unit, unit_loss, 0, ""),
    "binary cross-entropy": (Probability, saturated_loss, 1, None),
}


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("name", OVERFLOWS)
def test_gradient_overflow(name: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    make, loss_of, number, module = OVERFLOWS[name]
    seed_everything()
    model = make()
    assert not all(g.isfinite().all() for g in gradients(model, loss_of(model, number))), "at a loss scale of 1"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "autocast", FloatsOnly)
        assert all(g.isfinite().all() for g in gradients(model, loss_of(model, number))), "and not in float32"

    run = guard(scaled_steps(model, loss_of, number + 1, init_scale=64.0))

    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.step, first.phase, first.dtype) == ("gradient-overflow", number, "backward", "float16")
    assert first.module == module
    assert first.evidence["limit"] == 65504.0
    assert {"use-bf16", "disable-amp"} <= {fix.action for fix in first.fixes if fix.verified}


class FloatsOnly:
    """Stands for autocast in a step that must run in float32."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("name", OVERFLOWS)
def test_no_epsilon_for_a_cast(name: str, guard: Guard) -> None:
    """Moving what is only converted by 0.001 cannot help, whatever the number."""
    make, loss_of, number, _ = OVERFLOWS[name]
    seed_everything()
    first = guard(scaled_steps(make(), loss_of, number + 1, init_scale=64.0)).first
    assert not any("operand of to_copy" in fix.how or "operand of mm" in fix.how for fix in first.fixes), first.fixes


FLUSHED: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "norm of small numbers": (lambda x: (x * x).sum().sqrt(), [1e-5, 1e-5]),
    "epsilon that vanishes": (lambda x: ((x * x).sum() + 1e-8).sqrt(), [1e-5, 1e-5]),
    "log of a softmax behind clamp": (lambda x: x.softmax(-1).log().clamp(min=-5), [0.0, 20.0]),
}
"""In float16 the operand is 0, and the function has no derivative there; in float32 it is not, and has one."""


@pytest.mark.parametrize("name", FLUSHED)
def test_operand_flushed_to_zero(name: str, guard: Guard) -> None:
    function, x = FLUSHED[name]
    wide = Computes(function)
    function(wide.same(torch.tensor(x).unsqueeze(-1)).squeeze(-1)).mean().backward()
    assert wide.same.weight.grad is not None
    assert wide.same.weight.grad.isfinite().all(), "in float32"

    run = guard(step(Computes(function), torch.tensor(x), half))

    assert math.isfinite(run.result)
    assert run.first.cause == "fp16-underflow"
    assert "inf in float32" not in run.first.explanation
    assert "nan in float32" not in run.first.explanation


def test_product_beyond_float32(guard: Guard) -> None:
    model = Computes(lambda x: (x * 1e30).sin() * 1e10)
    first = guard(step(model, torch.tensor([1.0, 2.0]))).first
    assert (first.cause, first.op, first.dtype) == ("gradient-overflow", "aten.mul.Tensor", "float32")
    assert abs(first.evidence["value_fp64"]) > torch.finfo(torch.float32).max


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / x.pow(3) * x.pow(2)


def test_power_beyond_float32_in_a_custom_backward_is_bounded_from_above(guard: Guard) -> None:
    first = guard(step(Computes(lambda x: Cubed.apply(x * 1e20)), torch.tensor([1.0, 2.0]))).first
    assert (first.cause, first.op) == ("overflow", "aten.pow.Tensor_Scalar")
    (fix,) = first.fixes
    assert (fix.action, fix.verified) == ("clamp", True)
    assert "max=" in fix.how


# --- custom functions, derivatives of derivatives, givens --------------------------------------------------------------


class Magnitude(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        sign = x / x.abs()  # <- here
        return gradient * sign


def marked_line() -> int:
    text = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(text, 1) if line.endswith("x.abs()  # <- here"))


def applied(where: str, magnitude: Callable[[Tensor], Tensor] | None = None) -> Callable[[], None]:
    """A step in which the custom function is applied inside the module or behind it."""

    def apply(x: Tensor) -> Tensor:
        return magnitude(x) if magnitude is not None else Magnitude.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    model = Computes(apply if where == "module" else lambda x: x)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.tensor([0.0, 1.0]))
        (out if where == "module" else apply(out)).mean().backward()
        optimizer.step()

    return body


@pytest.mark.parametrize("where", ["module", "glue"])
def test_line_inside_the_backward_of_a_custom_function(where: str, guard: Guard) -> None:
    first = guard(applied(where)).first
    assert (first.cause, first.op) == ("singular-gradient", "aten.div.Tensor")
    assert first.location is not None
    assert (first.location.line, first.location.code) == (marked_line(), "sign = x / x.abs()  # <- here")


magnitude = Magnitude.apply


@pytest.mark.parametrize("where", ["module", "glue"])
def test_custom_function_known_by_another_name_before_the_guard(where: str, guard: Guard) -> None:
    before = magnitude
    first = guard(applied(where, lambda x: magnitude(x))).first
    assert (first.cause, first.evidence["rung"]) == ("singular-gradient", "replay")
    assert first.location is not None
    assert first.location.line == marked_line()
    assert magnitude is before, "the name stands for what it did"


def test_custom_function_in_a_closure_before_the_guard(guard: Guard) -> None:
    """It cannot be recorded. The step is not replayed without it, but seen when it happens again."""
    model, apply = Computes(lambda x: x), magnitude

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for _ in range(6):
            out = model(torch.tensor([0.0, 1.0]))
            scaler.scale(out.mean() + apply(out).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    found = [incident for incident in guard(body).report.incidents if incident.phase == "backward"]
    assert [(incident.cause, incident.evidence["rung"]) for incident in found] == [("singular-gradient", "live-trace")]


def test_module_that_applied_a_custom_function(guard: Guard) -> None:
    assert guard(applied("module")).first.module == ""


def test_gradient_penalty(guard: Guard) -> None:
    """The norm of a slope of 0."""
    critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.zeros_(critic[2].weight)

    def body() -> None:
        optimizer = torch.optim.Adam(critic.parameters())
        x = torch.randn(4, 3, requires_grad=True)
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        norm = slope.pow(2).sum(-1).sqrt()  # norm of the slope
        (critic(x).mean() + (norm - 1).pow(2).mean()).backward()
        optimizer.step()

    run = guard(body)
    first = run.first
    assert (first.cause, first.module) == ("singular-gradient", None)
    assert first.location is not None
    assert first.location.code.endswith("# norm of the slope")
    assert first.evidence["derivative_of"] == "aten.sqrt.default"
    assert "add-epsilon" in {fix.action for fix in first.fixes if fix.verified}


@pytest.mark.parametrize("where", ["input", "target"])
def test_given_that_the_loss_filters(where: str, guard: Guard) -> None:
    model = nn.Linear(3, 2)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    (x if where == "input" else y)[4, 1] = math.nan

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        error = (model(x) - y).pow(2)
        torch.nan_to_num(error).mean().backward()
        optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    assert (run.first.cause, run.first.evidence["samples"]) == ("nonfinite-input", [4])


class Two(nn.Module):
    """A stem, a head behind a norm of zeros, and a part beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.other = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        hidden = hidden + (hidden * 0.0).pow(2).sum().sqrt()
        return self.head(hidden) + self.other(x)


def test_parameters_are_listed_on_their_sides(guard: Guard) -> None:
    """Behind the bad derivative gradients are finite, before it they are not."""
    parameters = guard(step(Two(), torch.ones(2, 4))).first.evidence["parameters"]
    assert parameters["nonfinite"] == ["stem.weight", "stem.bias"]
    assert sorted(parameters["finite"]) == ["head.bias", "head.weight", "other.bias", "other.weight"]
    assert (parameters["nonfinite_count"], parameters["finite_count"]) == (2, 4)


def test_parameters_of_several_roots_can_be_told_apart(guard: Guard) -> None:
    model = Two()

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hidden = model.stem(torch.ones(2, 4))
        model.head(hidden + (hidden * 0.0).pow(2).sum().sqrt()).mean().backward()
        optimizer.step()

    parameters = guard(body).first.evidence["parameters"]
    assert len({*parameters["finite"], *parameters["nonfinite"]}) == 4
