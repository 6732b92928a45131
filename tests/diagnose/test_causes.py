"""Each cause is decided from numbers: small computations in a module, and what must be said of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from watching import Watched

Guard = Callable[..., Watched]
INF = math.inf
F32_MIN = torch.finfo(torch.float32).min


class Computes(nn.Module):
    """A module around one function of what a linear layer gives: the layer makes its input's own numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.same = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.same.weight)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.same(x.unsqueeze(-1)).squeeze(-1))


@dataclass(frozen=True)
class Case:
    """A function of x, its x, the precision of autocast (None: float32), and what must be found."""

    cause: str
    op: str
    function: Callable[[Tensor], Tensor]
    x: list[float]
    dtype: torch.dtype | None = None


half, bf16 = torch.float16, torch.bfloat16
ROW = torch.tensor([True, False])
FUTURE = torch.ones(3, 3).triu(1).bool()
BUT_LAST = torch.tensor([True, True, False])

CASES: dict[str, Case] = {
    # fp16-overflow
    "product": Case("fp16-overflow", "mul", lambda x: x * x, [300.0, 2.0], half),
    "power": Case("fp16-overflow", "pow", lambda x: x.pow(2).sum(), [300.0, 2.0], half),
    "exponential": Case("fp16-overflow", "exp", lambda x: x.exp(), [12.0, 2.0], half),
    "long sum": Case("fp16-overflow", "sum", lambda x: x.expand(4096, 2).sum(), [100.0, 1.0], half),
    "matrix product": Case("fp16-overflow", "mm", lambda x: x[:, None] @ x[None], [300.0, 1.0], half),
    "reciprocal of a small number": Case("fp16-overflow", "reciprocal", lambda x: 1 / x, [1e-5, 1.0], half),
    # overflow
    "exponential beyond float32": Case("overflow", "exp", lambda x: x.exp(), [100.0, 1.0]),
    "product beyond float32": Case("overflow", "mul", lambda x: x * x, [1e30, 1.0]),
    "power beyond float32": Case("overflow", "pow", lambda x: x.pow(3), [1e20, 1.0]),
    "quotient by a tiny divisor": Case("overflow", "div", lambda x: x / (-x).exp(), [98.0, 1.0]),
    "sum beyond float32": Case("overflow", "sum", lambda x: x.sum(), [3e38, 3e38]),
    "exponential beyond bfloat16": Case("overflow", "exp", lambda x: x.exp(), [100.0, 1.0], bf16),
    # mask-overflow
    "constant subtracted": Case("mask-overflow", "sub", lambda x: x - 1e9, [1.0, 2.0], half),
    "mask of a large number subtracted": Case("mask-overflow", "mul", lambda x: x - (x * 0 + 1) * 1e9, [1.0, 2.0], half),
    "constant times a mask": Case("mask-overflow", "mul", lambda x: (x * 0 + 1) * -1e9, [1.0, 2.0], half),
    "where with a constant": Case("mask-overflow", "scalar_tensor", lambda x: torch.where(ROW, x, -1e9), [1.0, 2.0], half),
    "float32's minimum added": Case("mask-overflow", "add", lambda x: x + F32_MIN, [1.0, 2.0], half),
    "two minima added": Case(
        "mask-overflow", "add", lambda x: x.masked_fill(x > 1, torch.finfo(half).min) + torch.finfo(half).min, [1.0, 2.0], half
    ),
    "mask cast down": Case("mask-overflow", "_to_copy", lambda x: x + torch.full((2,), F32_MIN).to(x.dtype), [1.0, 1.0], half),
    # fp16-underflow
    "square of a small number": Case("fp16-underflow", "div", lambda x: x / x.pow(2), [1e-4, 1.0], half),
    "both sides of a quotient": Case("fp16-underflow", "div", lambda x: (x * x + 0) / (x * x + 1e-8), [1e-4, 1.0], half),
    "epsilon that vanishes": Case("fp16-underflow", "rsqrt", lambda x: (x * x + 1e-8).rsqrt(), [1e-4, 1.0], half),
    "log of a softmax": Case("fp16-underflow", "log", lambda x: torch.log(x.softmax(-1)), [0.0, 20.0], half),
    # division-by-zero
    "x/0": Case("division-by-zero", "div", lambda x: (x + 1) / (x - x), [1.0, 2.0]),
    "0/0": Case("division-by-zero", "div", lambda x: (x - x) / (x - x), [1.0, 2.0]),
    "divisors on their way to 0": Case("division-by-zero", "div", lambda x: x / (-x).exp(), [98.0, 200.0]),
    "rsqrt of 0": Case("division-by-zero", "rsqrt", lambda x: x.rsqrt(), [0.0, 2.0]),
    "reciprocal of 0": Case("division-by-zero", "reciprocal", lambda x: x.reciprocal(), [0.0, 2.0]),
    "negative power of 0": Case("division-by-zero", "pow", lambda x: x.pow(-1.5), [0.0, 2.0]),
    "division by 0 in float16 and float32": Case("division-by-zero", "div", lambda x: x / (x - x), [1.0, 2.0], half),
    # domain-error
    "log of 0": Case("domain-error", "log", lambda x: x.log(), [0.0, 1.0]),
    "log of a negative number": Case("domain-error", "log", lambda x: x.log(), [-1.0, 1.0]),
    "root of a negative number": Case("domain-error", "sqrt", lambda x: x.sqrt(), [-1e-9, 1.0]),
    "acos beyond 1": Case("domain-error", "acos", lambda x: x.acos(), [1.0000001, 0.0]),
    "log1p of -1": Case("domain-error", "log1p", lambda x: x.log1p(), [-1.0, 0.0]),
    "atanh of 1": Case("domain-error", "atanh", lambda x: x.atanh(), [1.0, 0.0]),
    "fractional power of a negative number": Case("domain-error", "pow", lambda x: x.pow(0.5) + x.pow(0.3), [-1.0, 1.0]),
    "log(0) times 0": Case("domain-error", "log", lambda x: x * x.log(), [0.0, 1.0]),
    # empty-reduction
    "mean of nothing": Case("empty-reduction", "mean", lambda x: x[x > 5].mean(), [0.0, 1.0]),
    "deviation of one": Case("empty-reduction", "std", lambda x: x[:1].std(), [1.0, 2.0]),
    "every target ignored": Case(
        "empty-reduction", "nll_loss_forward", lambda x: F.cross_entropy(x[None], torch.tensor([-100])), [1.0, 2.0]
    ),
    # masked-softmax
    "softmax of a masked row": Case("masked-softmax", "_softmax", lambda x: x.masked_fill(x > 0, -INF).softmax(-1), [1.0, 2.0]),
    "log-softmax of a row without a key": Case(
        "masked-softmax", "_log_softmax", lambda x: x.masked_fill(x > 0, -INF).log_softmax(-1).exp(), [1.0, 2.0]
    ),
    "softmax by hand": Case(
        "masked-softmax",
        "sub",
        lambda x: (e := (m := x.masked_fill(x > 0, -INF)).sub(m.max(-1, keepdim=True)[0]).exp()) / e.sum(-1, keepdim=True),
        [1.0, 2.0],
    ),
    # infeasible-target
    "label whose logit is masked": Case(
        "infeasible-target",
        "nll_loss_forward",
        lambda x: F.cross_entropy(x.masked_fill(ROW, -INF)[None], torch.tensor([0])),
        [1.0, 2.0],
    ),
    "label whose logit is masked, cross entropy by hand": Case(
        "infeasible-target",
        "index",
        lambda x: torch.logsumexp(m := x.masked_fill(ROW, -INF), -1) - m[torch.tensor([0])],
        [1.0, 2.0],
    ),
    # indeterminate
    "difference of intended infinities": Case(
        "indeterminate", "sub", lambda x: x.masked_fill(ROW, INF) - x.masked_fill(ROW, INF), [1.0, 2.0]
    ),
    "0 times an intended infinity": Case("indeterminate", "mul", lambda x: x.masked_fill(ROW, INF) * 0.0, [1.0, 2.0]),
}  # fmt: skip


def step(function: Callable[[Tensor], Tensor], x: list[float], dtype: torch.dtype | None) -> Callable[[], None]:
    model, data = Computes(function), torch.tensor(x)

    def body() -> None:
        with torch.autocast("cpu", dtype=dtype or half, enabled=dtype is not None):
            out = model(data)
        loss = out.float().mean()
        loss.backward()

    return body


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", CASES)
def test_cause(name: str, guard: Guard) -> None:
    case = CASES[name]

    run = guard(step(case.function, case.x, case.dtype))

    assert run.faults == 0, run.stderr
    first = run.first
    assert (first.cause, first.op and first.op.split(".")[1].rstrip("_")) == (case.cause, case.op), first.explanation
    assert first.module == ""
    assert first.location is not None
    assert first.location.file == __file__
    assert first.evidence["rung"] == "replay"
    assert len(run.report.incidents) == 1


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("name", CASES)
def test_some_fix_is_verified(name: str, guard: Guard) -> None:
    case = CASES[name]
    fixes = guard(step(case.function, case.x, case.dtype)).first.fixes
    assert any(fix.verified for fix in fixes), fixes
    order = [{True: 0, None: 1, False: 2}[fix.verified] for fix in fixes]
    assert order == sorted(order), "what was seen to work comes first"


def test_the_divisor_is_accused_where_both_sides_of_a_quotient_are_flushed(guard: Guard) -> None:
    case = CASES["both sides of a quotient"]
    first = guard(step(case.function, case.x, case.dtype)).first
    assert first.evidence["operand"] == 1
    assert next(fix for fix in first.fixes if fix.action == "add-epsilon").verified


def test_log_of_a_mean_of_exponentials_has_its_stable_form(guard: Guard) -> None:
    first = guard(step(lambda x: x.exp().mean(-1, keepdim=True).log(), [-200.0, -300.0], None)).first
    assert (first.cause, first.fixes[0].action, first.fixes[0].verified) == ("domain-error", "stable-form", True)
    assert "(torch.logsumexp(x, -1, keepdim=True) - math.log(x.shape[-1]))" in first.fixes[0].how


def test_log_of_a_softmax_in_a_loss_function_has_its_stable_form(guard: Guard) -> None:
    """Outside every module, too, what made an operand is known."""

    def body() -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        for scale in (1.0, 1000.0):
            probabilities = torch.softmax(model(torch.randn(5, 4) * scale), -1)
            (-torch.log(probabilities)).sum(-1).mean().backward()

    first = guard(body).first
    assert (first.module, first.fixes[0].action, first.fixes[0].verified) == (None, "stable-form", True)
    assert first.fixes[0].how == (
        "torch.log_softmax(x, dim) in place of: torch.log(probabilities)\n# x is what softmax is given"
    )


INNOCENT: dict[str, tuple[Callable[[Tensor], Tensor], list[float], torch.dtype | None]] = {
    "causal mask": (lambda x: (x[:, None] * x[None]).masked_fill(FUTURE, -INF).softmax(-1), [1, 2, 3], half),
    "sentinel": (lambda x: torch.maximum(torch.full((3,), -INF), x), [1, 2, 3], None),
    "log cut off by where": (lambda x: torch.where(x > 0, x, x.detach().log()), [1, 2, 3], None),
    "infinity clamped": (lambda x: (x.detach() / 0.0).clamp(max=5.0) + x, [1, 2, 3], None),
    "exp of -inf": (lambda x: x * torch.full((3,), -INF).exp(), [1, 2, 3], None),
    "logsumexp over one finite entry": (lambda x: x.masked_fill(BUT_LAST, -INF).logsumexp(-1), [1, 2, 3], None),
    "large and finite": (lambda x: x * 60000.0 / 60000.0, [1, 1, 1], half),
    "nan_to_num": (lambda x: x + torch.nan_to_num((x.detach() - x.detach()) / 0.0), [1, 2, 3], None),
}  # fmt: skip


@pytest.mark.parametrize("name", INNOCENT)
def test_innocent_infinity_is_no_incident(name: str, guard: Guard) -> None:
    function, x, dtype = INNOCENT[name]
    run = guard(step(function, [float(v) for v in x], dtype))
    assert run.faults == 0
    assert run.report.incidents == ()


# --- PyTorch's own refusal, CTC, givens --------------------------------------------------------------------------------


def test_constant_that_pytorch_refuses_to_convert(guard: Guard) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x).masked_fill(ROW, -1e9).softmax(-1)

    model = Masks()

    def body() -> None:
        with torch.autocast("cpu", dtype=half), pytest.raises(RuntimeError, match="without overflow"):
            model(torch.ones(1, 2))

    run = guard(body)
    assert run.faults == 0
    first = run.first
    assert (first.cause, first.op, first.dtype) == ("mask-overflow", "aten.masked_fill.Scalar", "float16")
    assert {"mask-value", "disable-amp"} <= {fix.action for fix in first.fixes if fix.verified}


def test_ctc_names_the_sample(guard: Guard) -> None:
    logits = torch.randn(3, 4, 5, requires_grad=True)
    model = nn.Identity()

    def body() -> None:
        lengths = torch.tensor([2, 5, 1, 2])
        F.ctc_loss(
            model(logits).log_softmax(-1), torch.ones(4, 5, dtype=torch.long), torch.tensor([3] * 4), lengths
        ).backward()

    run = guard(body)
    assert run.first.cause == "infeasible-target"
    assert run.first.evidence["samples"] == [1]
    assert "sample 1" in run.first.explanation


def test_a_line_that_stays_as_it_is_is_not_told_as_the_fix(guard: Guard) -> None:
    case = CASES["label whose logit is masked"]
    fix = guard(step(case.function, case.x, case.dtype)).first.fixes[0]
    assert fix.action == "filter-sample"
    assert fix.how.splitlines()[0].endswith(", in:")


def test_an_entry_that_was_found_by_its_value_is_no_label(guard: Guard) -> None:
    def gap(x: Tensor) -> Tensor:
        allowed = x.masked_fill(ROW, -INF)
        return torch.logsumexp(allowed, -1) - allowed.gather(-1, allowed.argmin(-1, keepdim=True))

    assert guard(step(gap, [1.0, 2.0], None)).first.cause == "indeterminate"


@pytest.mark.parametrize("where", ["input", "target"])
def test_bad_sample_of_the_batch_is_named(where: str, guard: Guard) -> None:
    model = nn.Linear(3, 2)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    (x if where == "input" else y)[4, 1] = math.nan

    def body() -> None:
        for batch in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6):
            F.mse_loss(model(batch[0]), batch[1]).backward()

    run = guard(body)
    assert run.first.cause == "nonfinite-input"
    assert run.first.phase == "data"
    assert run.first.evidence["samples"] == [4]
    assert run.first.evidence["name"] == ("batch[0]" if where == "input" else "batch[1]")
    assert run.first.evidence["role"] == where
    assert "filter-sample" in {fix.action for fix in run.first.fixes if fix.verified}


def test_parameter_that_an_update_has_poisoned_names_the_step(guard: Guard) -> None:
    """The bad update came from a gradient that the loss did not show."""
    model = nn.Linear(2, 1)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            if step == 2:
                assert model.weight.grad is not None
                model.weight.grad.fill_(math.nan)
            optimizer.step()

    run = guard(body)
    first = run.first
    assert (first.cause, first.step, first.phase) == ("nonfinite-parameter", 3, "parameters")
    assert first.evidence["name"] == "weight"
    assert first.evidence["since_step"] == 2
    assert len(run.report.incidents) == 1


def test_float_undone_by_autocast_is_said(guard: Guard) -> None:
    """`.float()` inside autocast is undone by the next matrix product."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.q.weight, 100.0)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).float() * 1.0
            return (q @ q.t()).softmax(-1)

    model = Scores()

    def body() -> None:
        with torch.autocast("cpu", dtype=half):
            loss = model(torch.ones(2, 4)).float().mean()
        loss.backward()

    first = guard(body).first
    assert (first.cause, first.op) == ("fp16-overflow", "aten.mm.default")
    assert first.evidence["float_undone_by_autocast"] is True
    assert ".float()" in first.explanation


# --- evaluation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_that_overflows(mode: Any, guard: Guard) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(50.0)

    def body() -> None:
        with mode(), torch.autocast("cpu", dtype=half):
            for length in (1.0, 500.0):
                model(torch.full((2, 4), length))

    first = guard(body).first
    assert (first.cause, first.mode, first.module) == ("fp16-overflow", "eval", "0")
    assert any(fix.action == "force-fp32" and fix.verified for fix in first.fixes)


def test_statistic_poisoned_in_training_is_explained_by_its_step(guard: Guard) -> None:
    """The batch is skipped by the script; BatchNorm has taken it in already, and evaluation shows it later."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    data = torch.randn(5, 8, 3)
    data[2, 1, 0] = math.inf

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in data:
            loss = model(x).mean()
            if not loss.isfinite():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(data[0])

    run = guard(body)
    assert run.faults == 0
    by_mode = {incident.mode: incident for incident in run.report.incidents}
    assert by_mode["train"].step == 2
    shown = by_mode["eval"]
    assert shown.cause == "nonfinite-parameter"
    assert shown.evidence["name"] in ("1.running_mean", "1.running_var")
    assert shown.evidence["poisoned_by"]["step"] == 2
    assert "poisoned in step 2 by addmm at test_causes.py:" in shown.explanation
    reset = next(fix for fix in shown.fixes if fix.action == "initialise-parameter")
    assert "of step 2, which poisoned it" in reset.how
    assert "before training" not in reset.how


def test_masked_logits_returned_in_evaluation_are_no_failure(guard: Guard) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).masked_fill(ROW, -INF)

    model = Policy().eval()

    def body() -> None:
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 2)).softmax(-1)

    assert guard(body).report.incidents == ()


def test_teacher_with_infinite_logits_in_a_healthy_step_is_no_failure(guard: Guard) -> None:
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        teacher.bias[0] = -INF

    def body() -> None:
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(3, 2)
            with torch.no_grad():
                target = teacher(x).softmax(-1)
            loss = F.cross_entropy(student(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert guard(body).report.incidents == ()


@pytest.mark.parametrize("seed", [0, 14])  # from 14 the first update makes the weights 95 times as large
def test_loss_that_the_script_looks_at_and_drops(seed: int, guard: Guard) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)

    def body() -> int:
        dropped = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            loss = torch.log(model(torch.ones(3, 2)).pow(2).mean() * (step != 1))
            if not math.isfinite(loss.item()):
                dropped += 1
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return dropped

    run = guard(body)
    assert run.result == 1
    assert run.causes == ["domain-error"]
    assert (run.first.step, run.first.op) == (1, "aten.log.default")


@pytest.mark.parametrize(("constant", "cause"), [(-1e9, "mask-overflow"), (-INF, "masked-softmax")])
def test_mask_in_a_buffer_that_is_cast_with_the_model(constant: float, cause: str, guard: Guard) -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4, 4), constant).triu(0))  # no key for row 0

        def forward(self, x: Tensor) -> Tensor:
            return (self.score(x) + self.mask).softmax(-1)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Masks(), Masks()])

        def forward(self, x: Tensor) -> Tensor:
            return sum((part(x) for part in self.parts), x)

    def body() -> None:
        model = Two()
        with torch.no_grad():
            model(torch.randn(4, 4))
        model.half().eval()
        with torch.no_grad():
            model(torch.randn(4, 4).half())

    incident = guard(body).report.incidents[-1]
    assert incident.cause == cause
    if cause == "mask-overflow":
        (fix,) = incident.fixes
        assert fix.verified
        assert "parts[0].mask, parts[1].mask" in fix.how
        assert "-1e+09" in incident.explanation
