"""What an Amp cannot be given: an error of our own names it, and neither model nor optimizer has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_loops import MODES, batch, made, model_of, same, train
from torch import nn

import ampguard
import ampguard.errors
from ampguard.engine.policies import Rollback, Skip
from ampguard.errors import AmpguardError, CheckpointError, PatternError, PrecisionError, SetupError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": None}, "accumulate=None is a NoneType"),
        ({"accumulate": math.inf}, "accumulate=inf"),
        ({"accumulate": math.nan}, "accumulate=nan"),
        ({"accumulate": 2.5}, "accumulate=2.5"),
        ({"patience": math.inf}, "patience=inf"),
        ({"max_grad_norm": True}, "max_grad_norm=True is a bool"),
        ({"init_scale": 0}, "init_scale=0"),
        ({"init_scale": 1e39}, r"init_scale=1e\+39: .* from 5.96e-08, .* to 3.4e\+38"),
        ({"init_scale": 1e-30}, r"init_scale=1e-30: .* from 5.96e-08, "),
        ({"init_scale": math.nan}, "init_scale=nan"),
        ({"init_scale": "dynamic"}, "init_scale='dynamic' is a str"),
        ({"growth_interval": 1.5}, "growth_interval=1.5"),
        ({"on_nonfinite": ["skip"]}, "unknown on_nonfinite="),
        ({"on_nonfinite": Skip}, r"a Policy that was made: Skip\(\)"),
        ({"max_norm": 1.0}, "no option max_norm=; nearest: max_grad_norm="),
        ({"scheduler": None}, "no option scheduler=; nearest: schedulers="),
        ({"force_fp32": nn.LayerNorm}, "patterns over the paths of modules, not a type"),
        ({"force_fp32": 3}, "patterns over the paths of modules, not a int"),
        ({"precision": None}, "unknown precision None\n"),
        ({"eval_precision": "fp3"}, "unknown eval_precision 'fp3'; nearest: 'fp32'"),
        ({"precision": torch.float16}, "unknown precision torch.float16; nearest: .*'float16'"),
        ({"precision": "bf16-true", "seed": "a"}, "seed='a' of the rounding is a str"),
    ],
)
def test_options(options: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(AmpguardError, match=says):
        ampguard.Amp(model, optimizer, **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    ampguard.Amp(model, optimizer, "O2")  # nothing has changed that another Amp would refuse


def test_a_rollback_to_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    policy = Rollback(folder=tmp_path / "file" / "snapshots")
    with pytest.raises(SetupError, match=r"snapshots'\): no snapshot can be written there \(.*\n.*kept in memory then"):
        ampguard.Amp(model, optimizer, "O2", on_nonfinite=policy)
    for wrong in ({"every": "2"}, {"every": 0}, {"folder": 3}):
        with pytest.raises(SetupError, match=f"{next(iter(wrong))}="):
            Rollback(**wrong)
    ampguard.Amp(model, optimizer, "O2", on_nonfinite=Rollback(folder=tmp_path / "snapshots"))
    assert list(tmp_path.glob("snapshots/*")) == []


def test_the_same_thing_twice() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SetupError, match="'Linear 0' and 'Linear 1' are the same"):
        ampguard.Amp([model, model], optimizer)
    with pytest.raises(SetupError, match="'a' and 'b' are the same"):
        ampguard.Amp(model, {"a": optimizer, "b": optimizer})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda amp: amp.autocast("fp32").__enter__(), r"amp.autocast\(training='fp32'\)"),
        (lambda amp: amp.backward(model_of(amp)(batch(0)[0]).mean(), 3), "a int is no optimizer"),
        (lambda amp: amp.load(3), "named by a path, not by a int"),
        (lambda amp: amp.save(None), "named by a path, not by a NoneType"),
        (lambda amp: setattr(amp, "max_grad_norm", 0.5), "amp.max_grad_norm = 0.5: .*made with\n  do    to clip by"),
        (lambda amp: setattr(amp, "accumulate", 2), r"amp.accumulate = 2: .*made with\n  do    give it to Amp\("),
    ],
)
def test_calls(call: Callable[[ampguard.Amp], object], says: str) -> None:
    amp = made("fp16")
    with pytest.raises((SetupError, CheckpointError), match=says):
        call(amp)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_converted_later(mode: str) -> None:
    amp = made(mode)
    train(amp, range(2))
    model_of(amp).to(torch.float64)
    with pytest.raises(SetupError, match=r"moved or converted after Amp was made: `inner.weight` was .*float64 on cpu"):
        train(amp, range(2, 3))
    amp = made(mode)
    model_of(amp).to("cpu")  # where it is
    train(amp, range(2))


def test_a_model_whose_norms_alone_are_converted_later() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    amp = ampguard.Amp(model, torch.optim.AdamW(model.parameters()), "O2", init_scale=256.0)
    train(amp, range(2))
    model.half()
    with pytest.raises(SetupError, match=r"`1.weight` was float32 on cpu, and is float16 on cpu"):
        train(amp, range(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_has_stepped_before(mode: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        x, y = batch(number)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    amp = ampguard.Amp(model, optimizer, mode, init_scale=256.0)
    kept = [optimizer.state[p]["exp_avg"] for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.allclose(a.float(), b, rtol=1e-2, atol=1e-6) for a, b in zip(kept, moments, strict=True))
    losses = train(amp, range(3, 40))
    assert amp.steps == 37
    assert losses[-1] < losses[0]


def test_a_wrapper_that_is_an_optimizer_without_hooks() -> None:
    """As Lookahead is written often: it takes what its optimizer holds, and calls no constructor."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.calls = base, 0
            self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return self.base.step(closure)

        def state_dict(self) -> dict[str, Any]:
            return self.base.state_dict()

    model, twin = (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    wrapper = Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2))
    wrapped = ampguard.Amp(model, wrapper, "fp16", init_scale=256.0, max_grad_norm=1.0)
    plain = ampguard.Amp(
        twin, torch.optim.Adam(twin.parameters(), lr=1e-2), "fp16", init_scale=256.0, max_grad_norm=1.0
    )
    spoil = {3: math.nan}
    assert train(wrapped, range(8), spoil)[-1] == pytest.approx(train(plain, range(8), spoil)[-1], rel=1e-4)
    assert wrapper.calls == wrapped.steps == 7


def test_an_own_loop_whose_parts_do_not_belong_together() -> None:
    model, other = nn.Linear(8, 4), nn.Linear(8, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(SetupError, match="belong to none of the models given"):
        ampguard.precision("O2", "cpu").prepare(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(SetupError, match="a Parameter is no Optimizer"):
        ampguard.precision("O2", "cpu").prepare(model, model.parameters())
    assert same(before, list(model.parameters()))
    with pytest.raises(PrecisionError, match="'gpu' is no device"):
        ampguard.precision("O1", "gpu")


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.LayerNorm, ["0"], None])
def test_what_is_no_pattern(given: Any) -> None:
    with pytest.raises(PatternError, match="takes patterns"):
        ampguard.force_fp32(nn.Sequential(nn.Linear(2, 2)), given)


@pytest.mark.parametrize(
    ("call", "do"),
    [
        (lambda amp, loss: amp.scale(loss).backward(), r"amp\.backward\(loss\) multiplies the loss by the scale"),
        (lambda amp, loss: amp.update(), "delete the call"),
        (lambda amp, loss: amp.unscale(), r"amp\.unscale_\(optimizer\)"),
        (lambda amp, loss: amp.sclae, "Amp has no 'sclae'"),
        (lambda amp, loss: amp.autocsat, r"Amp has no 'autocsat'\n  do    call amp.autocast, if that is meant"),
    ],
)
def test_calls_of_another_scaler(call: Callable[[Any, Any], Any], do: str) -> None:
    amp = made("fp16")
    with pytest.raises(AmpguardError, match=do):
        call(amp, model_of(amp)(batch(0)[0]).mean())
    assert not hasattr(amp, "scale")


def test_backward_without_gradients_switched_on() -> None:
    """PyTorch's own works there, too."""
    amp = made("fp16")
    loss = model_of(amp)(batch(0)[0]).mean()
    with torch.no_grad():
        amp.backward(loss)
    assert amp.step().stepped


def test_errors_are_at_the_front_door() -> None:
    for name in ("NonfiniteError", "ProtocolError", "SetupError", "CheckpointError", "PoisonedStateError"):
        assert getattr(ampguard, name) is getattr(ampguard.errors, name)
        assert name in ampguard.__all__
