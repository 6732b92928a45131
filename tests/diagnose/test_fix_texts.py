"""What a verified fix prints is what was tried: the printed line, put into the script, gives the loss that it promises."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watching import Watched

from ampguard.incident import Fix, Incident

Guard = Callable[..., Watched]

HEAD = """\
import math
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
net = nn.Linear(4, 3)
with torch.no_grad():
    net.weight.abs_()
    net.bias.fill_(0.5)
x = torch.rand(6, 4) + 0.1
zero = torch.zeros(6, 3)
"""
INSIDE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        h = self.net(x)
        {line}
        return r
with torch.autocast("cpu", dtype=torch.float16, enabled={half}):
    loss = Model()(x).float().mean()
loss.backward()
"""
OUTSIDE = """
h = net(x)
{line}
loss = r.float().mean()
loss.backward()
"""


def script(line: str, place: str, half: bool = False) -> str:
    body = INSIDE if place == "inside" else OUTSIDE
    return HEAD + body.format(line=line, half=half)


def run(text: str, file: Path, guard: Guard) -> tuple[Incident | None, float]:
    file.write_text(text)
    linecache.checkcache()
    names: dict[str, Any] = {"__name__": "__main__"}
    ran = guard(lambda: exec(compile(text, str(file), "exec"), names))
    assert ran.faults == 0, ran.stderr
    incidents = ran.report.incidents
    return incidents[0] if incidents else None, float(torch.as_tensor(names["loss"]).detach())


def promised(fix: Fix) -> float:
    found = re.search(r"the loss is (\S+)$", fix.outcome)
    assert found is not None, fix
    return float(found[1])


LINES = {
    "second division": "r = h.sum() / (zero.sum() + 3) + h.mean() / zero.sum()",
    "first division": "r = h.mean() / zero.sum() + h.sum() / (zero.sum() + 3)",
    "beside a literal": "r = h / 2 + h / zero",
    "beside a number": "n = 5; r = h / n + h / zero",
    "below a number": "r = 3 / (h * 0)",
    "below itself": "z = h * 0; r = z / z",
    "function": "r = torch.div(h, h * 0)",
    "method": "r = h.true_divide(h * 0)",
    "in place": "r = h * 1; r.div_(zero)",
    "assignment": "r = h * 1; r /= zero",
    "reciprocal": "r = torch.reciprocal(h * 0)",
    "root": "r = (h * 0).rsqrt()",
    "negative power": "r = (h * 0) ** -1",
    "negative divisors": "r = h / (zero - h.round().sign() * (h > 1))",
    "logarithm": "r = torch.log(h * 0) * torch.log(h)",
    "last logarithm": "r = h.log() + torch.log(1 - h / h) + 1e-8",
    "logarithm in a loop": "r = sum([torch.log(h * k) for k in range(3)])",
    "loop of two": "r = sum([h.log() + torch.log(h * k) for k in range(3)])",
    "square root": "r = (h * 0 - 1e-9).sqrt()",
    "half power": "r = (h * 0 - 1e-3) ** 0.5",
    "exponential": "r = torch.exp(h * 1e3)",
    "hyperbolic cosine": "r = torch.cosh(h * -1e3)",
    "Bessel function": "r = torch.i0(h * 200)",
    "beside Python's numbers": "r = h * (4 / math.pi ** 2) + h / math.sqrt(len(h)) + h / zero",
    "product": "r = (h * 1e30) ** 4",
    "beside a call that divides": "r = F.normalize(h) / zero",
}


@pytest.mark.parametrize("place", ["inside", "outside"])
@pytest.mark.parametrize("name", LINES)
def test_printed_line_is_what_was_tried(name: str, place: str, guard: Guard, tmp_path: Path) -> None:
    line = LINES[name]
    first, _ = run(script(line, place), tmp_path / "script.py", guard)
    assert first is not None
    of_the_line = [f for f in first.fixes if f.action in ("add-epsilon", "clamp", "guard-empty")]
    assert any(f.verified for f in of_the_line), first.fixes
    as_code = [f for f in of_the_line if f.verified and " in: " not in f.how]
    in_words = name == "beside a call that divides"
    if in_words:
        assert all(" in: " in f.how for f in of_the_line), "the text does not tell which expression failed"
        return
    assert as_code
    for fix in as_code:
        statement = next(s for s in line.split("; ") if is_changed(s, fix.how))
        repaired = script(line.replace(statement, fix.how), place)
        namespace: dict[str, Any] = {}
        exec(repaired, namespace)
        value = namespace["loss"].item()
        assert math.isfinite(value)
        assert value == pytest.approx(promised(fix), rel=2e-3)


def is_changed(statement: str, new: str) -> bool:
    """Whether `new` is the statement with something added (or a number replaced)."""
    rest = iter(new)
    return all(any(c == n for n in rest) for c in statement)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("r = h[h > 1e9].mean() + h.mean()", "r = (h[h > 1e9].sum() / max(h[h > 1e9].numel(), 1)) + h.mean()"),
        ("r = torch.mean(h[h > 1e9]) + 1", "r = (h[h > 1e9].sum() / max(h[h > 1e9].numel(), 1)) + 1"),
        ("r = h[:0].mean(0)", "r = (h[:0].sum(0) / max(h[:0].shape[0], 1))"),
        ("r = h[:0].mean((0, 1))", None),
    ],
)
def test_mean_of_nothing(line: str, changed: str | None, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "empty-reduction"
    (fix,) = [fix for fix in first.fixes if fix.action == "guard-empty"]
    assert fix.verified
    if changed is None:
        assert "max(count, 1)" in fix.how
        return
    assert fix.how.endswith(f": {changed}")
    namespace: dict[str, Any] = {}
    exec(script(changed, "outside"), namespace)
    assert namespace["loss"].item() == pytest.approx(promised(fix), rel=2e-3)


def test_bound_leaves_a_loss_to_go_on_with(guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script("r = torch.i0(h * 200)", "outside"), tmp_path / "script.py", guard)
    assert first is not None
    (fix,) = [fix for fix in first.fixes if fix.action == "clamp"]
    assert fix.how == "r = torch.i0((h * 200).clamp(min=-10, max=10))"  # (of 70 it is 1e29: finite, and of no use)


def test_dead_epsilon_is_replaced(guard: Guard, tmp_path: Path) -> None:
    line = "r = h / ((h * 1e-5).pow(2).sum(-1, keepdim=True) + 1e-8)  # too small"
    first, _ = run(script(line, "inside", half=True), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "fp16-underflow"
    fix = next(f for f in first.fixes if f.action == "add-epsilon")
    assert fix.how == "r = h / ((h * 1e-5).pow(2).sum(-1, keepdim=True) + 0.01)"
    assert fix.verified is True


@pytest.mark.parametrize(
    ("line", "is_count"),
    [
        ("mask = (h > 1e9).float(); r = h / mask.sum()", True),
        ("mask = h > 1e9; r = h / mask.sum()", True),
        ("mask = (h > 1e9).float() * (h > 2).float(); r = h / mask.sum(0)", True),
        ("mask = torch.eye(6, 3); r = h / mask.sum(1, keepdim=True)", True),
        ("r = h / (h * 0).norm()", False),
        ("weight = h * 0; r = h / weight.sum()", False),
        ("weight = h * 0; r = h / weight", False),
        ("r = h / torch.tensor([0., 1., 2.])", False),
    ],
)
def test_only_a_count_is_raised_to_one(line: str, is_count: bool, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(line, "inside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "division-by-zero"
    guards = [f for f in first.fixes if f.action == "guard-empty"]
    assert bool(guards) == is_count
    if is_count:
        assert guards[0].verified is True
        assert ".clamp(min=1)" in guards[0].how
    else:
        assert {"add-epsilon"} <= {f.action for f in first.fixes if f.verified}


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("r = (h * -3e11) ** 4", "overflow"),
        ("r = (h * -3e20) ** 3", "overflow"),
        ("r = (-h) ** 1.5", "domain-error"),
        ("r = (-h).pow(h)", "domain-error"),
        ("r = 10.0 ** (h * 1e3)", "overflow"),
    ],
)
def test_power_of_a_negative_number(line: str, cause: str, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(line, "inside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == cause, first.explanation


def test_float64_overflow_speaks_of_float64(guard: Guard, tmp_path: Path) -> None:
    text = script("r = torch.exp(h.double() * 1e4)", "inside")
    first, _ = run(text, tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "overflow"
    assert "float64's range (1.8e+308)" in first.explanation
    (clamp,) = [fix for fix in first.fixes if fix.action == "clamp"]
    assert clamp.how == "r = torch.exp((h.double() * 1e4).clamp(max=10))", "700 is beyond float32, and 80 leaves 1e34"
    assert clamp.verified


def test_label_behind_a_sign_change(guard: Guard, tmp_path: Path) -> None:
    line = (
        "r = -h.masked_fill(torch.eye(6, 3).bool(), -math.inf).log_softmax(1).gather(1, torch.tensor([[0]] * 6)).mean()"
    )
    first, _ = run(script(line, "outside"), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "infeasible-target"
    assert first.explanation.startswith("gather ")
    assert first.evidence["labels"] == [0]
    assert first.fixes[0].verified is True
    assert promised(first.fixes[0]) > 0, "only the sample without a probability is dropped"


ENCODER = """\
import torch
from torch import nn
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
pad = torch.zeros(3, 4, dtype=torch.bool)
pad[1] = True
loss = 0.0
with torch.no_grad():
    out = net(torch.randn(3, 4, 8), src_key_padding_mask=pad)
assert out[1].isnan().all() and out[0].isfinite().all()
"""


def test_fused_attention_that_is_given_a_row_without_a_key(guard: Guard, tmp_path: Path) -> None:
    first, _ = run(ENCODER, tmp_path / "script.py", guard)
    assert first is not None
    assert (first.cause, first.op) == ("masked-softmax", "aten._transformer_encoder_layer_fwd.default")
    assert first.evidence["empty_rows"] == 1
    assert [f.verified for f in first.fixes if f.action == "fix-mask"] == [True]


HALF_WEIGHTS = """\
import torch
from torch import nn
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half().eval()
with torch.no_grad():
    net[0].weight.fill_(1.); net[1].weight.fill_(200.)
    out = net(torch.full((3, 4), 3000.).half())
loss = 0.0
"""


def test_advice_for_low_precision_weights_is_not_autocast(guard: Guard, tmp_path: Path) -> None:
    first, _ = run(HALF_WEIGHTS, tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "fp16-overflow"
    by_action = {f.action: f for f in first.fixes}
    assert by_action["disable-amp"].verified is True
    assert by_action["disable-amp"].how.endswith("net'].float(), its inputs too")  # names of the caller's
    assert by_action["use-bf16"].how.endswith("net'].to(torch.bfloat16), its inputs too")
    assert not any("autocast" in f.how for f in first.fixes)


def test_advice_under_autocast_names_the_device(guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script("r = (h * 1e4) * 1e4", "inside", half=True), tmp_path / "script.py", guard)
    assert first is not None
    assert first.cause == "fp16-overflow"
    hows = {f.action: f.how for f in first.fixes}
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in hows["use-bf16"]
    assert 'torch.autocast("cpu", enabled=False)' in hows["disable-amp"]


@pytest.mark.parametrize("name", ["second division", "logarithm", "square root", "exponential"])
def test_infinities_are_spelled_one_way(name: str, guard: Guard, tmp_path: Path) -> None:
    first, _ = run(script(LINES[name], "inside"), tmp_path / "script.py", guard)
    assert first is not None
    for text in (first.explanation, *(f.how for f in first.fixes)):
        assert not re.search(r"(?<![\w.])[+-]?(nan|inf)\b|(?<![+-])\bInf\b", text), text


def test_operators_outside_modules_may_have_run_under_autocast(guard: Callable[..., Any]) -> None:
    def body() -> None:
        torch.manual_seed(0)
        embedding, weight = nn.Embedding(50, 32), torch.randn(32, 32, requires_grad=True)
        x = embedding(torch.randint(0, 50, (16,))) * 200
        with torch.autocast("cpu", dtype=torch.float16):
            scores = x @ weight
            scores = torch.softmax(scores @ scores.t(), -1)
        scores.float().square().mean().backward()

    how = {fix.action: fix.how for fix in guard(body).first.fixes}
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in how["use-bf16"]
    assert 'torch.autocast("cpu", enabled=False)' in how["disable-amp"]


def test_casts_of_a_script_without_autocast(guard: Callable[..., Any]) -> None:
    def body() -> None:
        torch.manual_seed(0)
        embedding, weight = nn.Embedding(50, 32), torch.randn(32, 32, requires_grad=True)
        x = (embedding(torch.randint(0, 50, (16,))) * 200).half() @ weight.half()
        torch.softmax(x @ x.t(), -1).float().square().mean().backward()

    how = {fix.action: fix.how for fix in guard(body).first.fixes}
    assert "autocast" not in how["use-bf16"] + how["disable-amp"]


def test_a_forward_that_enters_autocast_itself_is_not_wrapped_from_outside(guard: Guard) -> None:
    """`autocast(enabled=False)` around its call would be undone by its own."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return (self.lift(x) * 3000.0).square().sum(-1)

    def body() -> None:
        torch.manual_seed(0)
        with torch.inference_mode():
            Scores().eval()(torch.randn(3, 4))

    run = guard(body)
    assert run.first.cause == "fp16-overflow"
    fix = next(fix for fix in run.first.fixes if fix.action == "force-fp32")
    assert fix.verified
    assert "all of Scores.forward" in fix.how
