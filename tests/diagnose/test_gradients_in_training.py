"""Bad gradients in whole trainings: one failure is one incident, and the training ends as it would have unguarded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from watching import Watched, fingerprint, seed_everything

Guard = Callable[..., Watched]
Training = Callable[[], list[Any]]
STEPS, BAD = 5, 2


class Lengths(nn.Module):
    """Lengths of projected vectors, by hand: a batch that is masked out has a derivative of 0/0."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor, keep: float) -> Tensor:
        out = self.head(self.stem(x) * keep)
        return out.pow(2).sum(-1).sqrt()  # <- here


def marked_line() -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(".sqrt()  # <- here"))


def loss_of(model: nn.Module, is_bad: bool) -> Tensor:
    return (model(torch.randn(6, 4), 0.0 if is_bad else 1.0).float() - 1).abs().mean()


TRAININGS: dict[str, Training] = {}


def training(make: Training) -> Training:
    TRAININGS[make.__name__.replace("_", " ")] = make
    return make


def plain_loop(make_optimizer: Callable[..., torch.optim.Optimizer], is_undone: bool = False) -> list[Any]:
    model = Lengths()
    optimizer = make_optimizer(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number == BAD).backward()
        optimizer.step()
    return [model, optimizer]


def scaled_loop(micro_steps: int = 1, clips: bool = False, fused: bool = False, **options: Any) -> list[Any]:
    """A GradScaler, perhaps over windows of micro-steps (the second of them is bad), perhaps clipping."""
    model = Lengths()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 64.0, **options})
    for number in range(STEPS):
        for micro_step in range(micro_steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model, number == BAD and micro_step == min(1, micro_steps - 1)) / micro_steps
            scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [model, optimizer, scaler]


def with_closure(make_optimizer: Callable[..., torch.optim.Optimizer]) -> list[Any]:
    model = Lengths()
    optimizer = make_optimizer(model.parameters())
    for number in range(STEPS):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number == BAD)
            loss.backward()
            return loss

        optimizer.step(closure)
    return [model, optimizer]


@training
def sgd() -> list[Any]:
    return plain_loop(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))


@training
def adamw() -> list[Any]:
    return plain_loop(lambda p: torch.optim.AdamW(p, lr=0.01))


@training
def one_tensor_at_a_time() -> list[Any]:
    return plain_loop(lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False))


@training
def fused() -> list[Any]:
    return plain_loop(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))


@training
def scaler() -> list[Any]:
    return scaled_loop()


@training
def scaler_with_clipping() -> list[Any]:
    return scaled_loop(clips=True)


@training
def scaler_with_a_fused_optimizer() -> list[Any]:
    return scaled_loop(fused=True)


@training
def disabled_scaler() -> list[Any]:
    return scaled_loop(enabled=False)


@training
def disabled_scaler_with_clipping() -> list[Any]:
    return scaled_loop(enabled=False, clips=True)


@training
def accumulation() -> list[Any]:
    model = Lengths()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        for micro_step in range(4):
            (loss_of(model, (number, micro_step) == (BAD, 1)) / 4).backward()
        optimizer.step()
    return [model, optimizer]


@training
def accumulation_with_a_scaler() -> list[Any]:
    return scaled_loop(micro_steps=3)


@training
def accumulation_with_a_scaler_and_clipping() -> list[Any]:
    return scaled_loop(micro_steps=3, clips=True)


@training
def accumulation_with_a_disabled_scaler() -> list[Any]:
    return scaled_loop(micro_steps=3, enabled=False)


@training
def closure_of_sgd() -> list[Any]:
    return with_closure(lambda p: torch.optim.SGD(p, lr=0.01))


@training
def closure_of_lbfgs() -> list[Any]:
    return with_closure(lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2))


@training
def clipped() -> list[Any]:
    model = Lengths()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number == BAD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [model, optimizer]


@training
def two_optimizers() -> list[Any]:
    """The optimizer of the part with finite gradients steps first."""
    model, other = Lengths(), nn.Linear(4, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (other, model)]
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss_of(model, number == BAD) + other(torch.randn(3, 4)).pow(2).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [model, other, *optimizers]


@training
def updated_by_hand() -> list[Any]:
    model = Lengths()
    for number in range(STEPS):
        model.zero_grad()
        loss_of(model, number == BAD).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
    return [model]


@training
def updated_by_hand_from_autograd_grad() -> list[Any]:
    model = Lengths()
    for number in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model, number == BAD), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient
    return [model]


@training
def gradients_put_there_by_hand() -> list[Any]:
    model = Lengths()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        gradients = torch.autograd.grad(loss_of(model, number == BAD), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [model, optimizer]


@training
def sharpness_aware() -> list[Any]:
    """The first of two backward passes perturbs the weights by its gradients."""
    model = Lengths()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number == BAD).backward()
        with torch.no_grad():
            steps = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for parameter, change in zip(model.parameters(), steps, strict=True):
                parameter.add_(change)
        optimizer.zero_grad()
        loss_of(model, number == BAD).backward()
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), steps, strict=True):
                parameter.sub_(change)
        optimizer.step()
    return [model, optimizer]


class Fits:
    """What a Lightning module does, without a class that needs Lightning when this file is read."""

    @staticmethod
    def with_lightning(precision: str, **options: Any) -> list[Any]:
        lightning = pytest.importorskip("lightning")
        from lightning.pytorch.plugins.precision import MixedPrecision

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net = Lengths()

            def training_step(self, batch: Any, number: int) -> Tensor:
                x, keep = batch
                return self.net(x, keep[0].item()).float().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=0.01)

        keep = torch.ones(4 * STEPS)
        keep[4 * BAD : 4 * BAD + 4] = 0.0
        data = torch.utils.data.TensorDataset(torch.randn(4 * STEPS, 4), keep)
        module = Module()
        half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
        how: dict[str, Any] = {"plugins": [half]} if precision == "fp16" else {"precision": precision}
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, **how, **options,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        return [module, *trainer.optimizers]


@training
def lightning_in_float32() -> list[Any]:
    return Fits.with_lightning("32-true")


@training
def lightning_in_bfloat16() -> list[Any]:
    return Fits.with_lightning("bf16-mixed")


@training
def lightning_in_float16() -> list[Any]:
    return Fits.with_lightning("fp16")


@training
def lightning_in_float16_with_clipping() -> list[Any]:
    return Fits.with_lightning("fp16", gradient_clip_val=1.0)


class Labelled(nn.Module):
    """As the Trainer calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Lengths()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        lengths = self.net(x[:, :4], x[0, 4].item())
        return {"loss": (lengths - labels).abs().mean(), "logits": lengths}


@training
def hugging_face_trainer() -> list[Any]:
    transformers = pytest.importorskip("transformers")
    x = torch.cat([torch.randn(4 * STEPS, 4), torch.ones(4 * STEPS, 1)], 1)
    x[4 * BAD : 4 * BAD + 4, 4] = 0.0
    data = [{"x": row, "labels": torch.tensor(1.0)} for row in x]
    model = Labelled()

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)  # type: ignore[arg-type]

    arguments = transformers.TrainingArguments(
        output_dir="unused", per_device_train_batch_size=4, max_steps=STEPS, report_to=[], disable_tqdm=True,
        use_cpu=True, logging_strategy="no", save_strategy="no",
    )  # fmt: skip
    InOrder(model, arguments, train_dataset=data).train()
    return [model]


def differing(plain: dict[str, Any], guarded: dict[str, Any]) -> list[str]:
    """What is not the same to the last bit (as text, where NaN equals NaN: LBFGS keeps its last loss as a float)."""
    assert plain.keys() == guarded.keys()
    return [key for key in plain if repr(guarded[key]) != repr(plain[key])]


def run_twice(make: Training, guard: Guard) -> tuple[dict[str, Any], dict[str, Any], Watched]:
    """The fingerprints of an unguarded and a guarded run, and what the guard said."""

    def seeded() -> dict[str, Any]:
        seed_everything()
        return fingerprint(*make())

    plain = seeded()
    run = guard(seeded)
    return plain, run.result, run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAININGS)
def test_training_ends_as_an_unguarded_one(
    name: str, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, guarded, run = run_twice(TRAININGS[name], guard)
    assert run.faults == 0, run.stderr
    assert run.report.status == "incidents", "there must have been an investigation"
    assert differing(plain, guarded) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAININGS)
def test_training_is_diagnosed(name: str, guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seed_everything()

    run = guard(TRAININGS[name])

    assert run.faults == 0, run.stderr
    (only,) = [incident for incident in run.report.incidents if incident.severity == "error"]
    assert (only.cause, only.step, only.mode, only.phase) == ("singular-gradient", BAD, "train", "backward")
    assert only.location is not None
    assert (only.location.file, only.location.line) == (__file__, marked_line())
    assert only.evidence["derivative_of"] == "aten.sqrt.default"
    assert only.evidence["rung"] == ("replay-inexact" if name == "two optimizers" else "replay")
    assert "add-epsilon" in {fix.action for fix in only.fixes if fix.verified}
    assert math.isfinite(only.evidence["loss"])


# --- what backward runs again ------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block with running statistics that backward computes again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, keep: float) -> Tensor:
        out = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant) * keep
        return out.pow(2).sum(-1).sqrt()


def checkpointed(use_reentrant: bool) -> list[Any]:
    model = Checkpointed(use_reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model, number == BAD)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [model, optimizer, scaler]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_running_statistics_of_a_checkpointed_block(use_reentrant: bool, guard: Guard) -> None:
    plain, guarded, run = run_twice(lambda: checkpointed(use_reentrant), guard)
    assert run.faults == 0, run.stderr
    assert differing(plain, guarded) == []


def hooked() -> list[Any]:
    """Gradients are written down by hooks of every kind."""
    model, seen = Lengths(), []
    model.head.weight.register_hook(lambda gradient: seen.append("tensor"))
    model.head.register_full_backward_hook(lambda module, given, made: seen.append("module"))
    model.stem[0].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number == BAD).backward()
        optimizer.step()
    return [model, optimizer, seen]


def test_hooks_are_not_run_for_the_script_again(guard: Guard) -> None:
    plain, guarded, _ = run_twice(hooked, guard)
    assert differing(plain, guarded) == []


# --- gradients that something else made bad, or that nobody uses -------------------------------------------------------


def healthy_steps(change: Callable[[nn.Module, int], None], steps: int = STEPS) -> Callable[[], None]:
    """Steps whose own gradients are finite; `change` may do something to them before the optimizer comes."""

    def body() -> None:
        seed_everything()
        model = Lengths()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(steps):
            optimizer.zero_grad()
            loss_of(model, False).backward()
            change(model, number)
            optimizer.step()

    return body


def poke(model: nn.Module, number: int) -> None:
    if number == BAD:
        gradient = model.get_parameter("head.weight").grad
        assert gradient is not None
        gradient[0, 1] = math.nan


def test_gradient_changed_by_hand(guard: Guard) -> None:
    """The step run again has finite gradients: nothing is made up, and the poisoned parameter tells the story."""
    run = guard(healthy_steps(poke))
    (only,) = run.report.incidents
    assert (only.cause, only.step) == ("nonfinite-parameter", BAD + 1)
    assert only.evidence["name"] == "head.weight"
    assert only.evidence["gradients_changed_in_step"] == BAD
    assert "something changed them between backward and the optimizer's step" in only.explanation


def test_gradient_changed_by_hand_in_the_last_step(guard: Guard) -> None:
    """No later step shows the poisoned parameter; the step itself was run again, and its gradients are finite."""
    run = guard(healthy_steps(poke, steps=BAD + 1))
    (only,) = run.report.incidents
    assert (only.cause, only.step, only.phase) == ("unexplained", BAD, "backward")
    assert "something changed them between backward and the optimizer's step" in only.explanation
    assert "could not be run again" not in only.explanation
    assert "operator by operator" not in only.explanation


@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
def test_gradient_changed_by_a_hook(kind: str, guard: Guard) -> None:
    """A hook that fails once: the honest answer is that the step's own gradients are finite."""
    calls = 0

    def body() -> None:
        seed_everything()
        model = Lengths()

        def bad_now() -> float:
            nonlocal calls
            calls += 1
            return math.inf if calls == BAD + 1 else 1.0

        def spoil_it(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(bad_now())

        if kind == "tensor":
            model.head.weight.register_hook(lambda gradient: gradient * bad_now())
        else:
            model.head.weight.register_post_accumulate_grad_hook(spoil_it)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, False).backward()
            optimizer.step()

    run = guard(body)
    assert run.faults == 0, run.stderr
    (only,) = run.report.incidents
    if kind == "tensor":
        assert (only.cause, only.evidence["name"]) == ("nonfinite-parameter", "head.weight")
        assert only.evidence["gradients_changed_in_step"] == BAD
    else:  # no replay runs such a hook
        assert (only.cause, only.step, only.phase) == ("unexplained", BAD, "backward")
        assert only.location is not None
        assert only.location.function.endswith("spoil_it")


def drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def filter_out(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.0)


@pytest.mark.parametrize("rescue", [drop, filter_out], ids=lambda rescue: rescue.__name__.replace("_", " "))
def test_gradients_that_the_script_deals_with_itself(rescue: Callable[[nn.Module], None], guard: Guard) -> None:
    """No bad gradient reaches an optimizer, and the training goes on: a batch was lost."""

    def body() -> None:
        seed_everything()
        model = Lengths()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, number == BAD).backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if not norm.isfinite():
                rescue(model)
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())

    run = guard(body)
    assert run.faults == 0
    found = [(i.cause, i.severity, i.step) for i in run.report.incidents if i.phase == "backward"]
    assert found == [("singular-gradient", "warning", BAD)]


def test_gradients_that_were_cleared_are_not_blamed(guard: Guard) -> None:
    """The first pass is bad and cleared, the second by another line: each is told of its own."""

    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.zero_grad()
        (model(torch.randn(6, 4)) * 0.0).sqrt().sum().backward()  # cleared
        optimizer.zero_grad()
        out = model(torch.randn(6, 4))
        out = out * 0.0
        out.pow(2).sum().pow(0.5).backward()  # used
        optimizer.step()

    incidents = guard(body).report.incidents
    lines = [incident.location.code.rpartition("# ")[2] for incident in incidents if incident.location is not None]
    assert lines == ["cleared", "used"]


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_sparse_gradients(micro_steps: int, guard: Guard) -> None:
    embed = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        embed.weight[2] = 0.0

    def body() -> None:
        optimizer = torch.optim.SparseAdam(embed.parameters(), lr=0.01)
        for number in range(STEPS):
            optimizer.zero_grad()
            for _ in range(micro_steps):
                embed(torch.tensor([1, 2 if number == BAD else 3, 1])).pow(2).sum(-1).sqrt().sum().backward()
            optimizer.step()

    run = guard(body)
    assert not embed.weight.isfinite().all()
    assert (run.first.cause, run.first.step) == ("singular-gradient", BAD)
    assert run.first.evidence["derivative_of"] == "aten.sqrt.default"
    assert [fix.action for fix in run.first.fixes if fix.verified]


# --- the autocast state of what is replayed ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_float32_product_outside_the_region_is_not_blamed(where: str, guard: Guard) -> None:
    """Its values are beyond float16, and float32 is what it is computed in."""

    def body() -> None:
        seed_everything()
        model = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(6, 4))
        out = out.float() * 1000.0
        similarity = out @ out.t()
        zero = out.sum() * 0.0
        bad = zero.log() if where == "loss" else zero.sqrt() * similarity.mean()
        (similarity.mean() * 1e-6 + bad).backward()
        optimizer.step()

    first = guard(body).first
    assert first.cause == ("domain-error" if where == "loss" else "singular-gradient")
    assert first.location is not None
    assert first.location.code.startswith("bad = ")


@pytest.mark.parametrize("enabled", [True, False], ids=["scaler", "no scaler"])
def test_gradients_that_overflow_where_two_calls_meet(enabled: bool, guard: Guard) -> None:
    """Both calls share one cast of the weight, and its gradient is their sum in float16: 40000 + 40000."""
    factor = 25.0 if enabled else 200.0

    def body() -> None:
        model = nn.Linear(4, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        for number in range(STEPS):
            optimizer.zero_grad()
            x = torch.ones(2, 4) * (100.0 if number == BAD else 1.0)
            with torch.autocast("cpu", dtype=torch.float16):
                one, two = model(x), model(x)
            scaler.scale((one.float().sum() + two.float().sum()) * factor).backward()
            scaler.step(optimizer)
            scaler.update()

    found = guard(body).report.incidents
    assert [(incident.cause, incident.step) for incident in found] == [
        ("loss-scale-overflow" if enabled else "gradient-overflow", BAD)
    ]


ANOMALIES = ("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")


@pytest.mark.filterwarnings(*ANOMALIES)
@pytest.mark.parametrize("has_scaler", [True, False])
@pytest.mark.parametrize("goes_on", [True, False])
def test_anomaly_detection_ends_the_script(goes_on: bool, has_scaler: bool, guard: Guard) -> None:
    """What one does first about a NaN. PyTorch then raises in backward; the step is still there to be explained."""

    def body() -> None:
        seed_everything()
        model = Lengths()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=has_scaler)
        with torch.autograd.set_detect_anomaly(True):
            for number in range(STEPS if goes_on else BAD + 1):
                optimizer.zero_grad()
                loss = scaler.scale(loss_of(model, number == BAD))
                if number == BAD:
                    with pytest.raises(RuntimeError, match="returned nan values"):
                        loss.backward()
                    continue
                loss.backward()
                scaler.step(optimizer)
                scaler.update()
            assert torch.is_anomaly_enabled()

    (only,) = (incident for incident in guard(body).report.incidents if incident.phase == "backward")
    assert (only.cause, only.step, only.occurrences) == ("singular-gradient", BAD, 1)
    assert only.location is not None
    assert only.location.line == marked_line()
    assert "returned nan values" in str(only.evidence["raised"])
    assert [fix.action for fix in only.fixes if fix.verified]


@pytest.mark.filterwarnings(*ANOMALIES)
def test_anomaly_that_reaches_no_parameter(guard: Guard) -> None:
    """A dead ReLU's zero keeps the NaN from the weights; anomaly detection has ended the script before."""

    def body() -> None:
        seed_everything()
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        with torch.no_grad():
            model[0].bias[2] = -100.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with torch.autograd.set_detect_anomaly(True):
            std = torch.sqrt(model(torch.randn(8, 4)).var(dim=0))  # dead unit
            loss = torch.relu(1 - std).mean()
            with pytest.raises(RuntimeError, match="returned nan values"):
                loss.backward()
        optimizer.zero_grad()

    (only,) = guard(body).report.incidents
    assert (only.cause, only.step, only.phase, only.op) == ("singular-gradient", 0, "backward", "aten.div.Tensor")
    assert only.location is not None
    assert "# dead unit" in only.location.code
    assert "reaches no parameter" in only.explanation
    assert all(fix.verified is None for fix in only.fixes)


@pytest.mark.filterwarnings(*ANOMALIES)
def test_nan_that_reaches_no_parameter_without_anomaly_detection(guard: Guard) -> None:
    def body() -> None:
        model = Lengths()
        leaf = torch.ones(3, requires_grad=True)
        (loss_of(model, False) + (leaf * 0.0).sqrt().mul(0.0).sum()).backward()

    assert guard(body).report.incidents == ()


@pytest.mark.filterwarnings(*ANOMALIES)
def test_backward_that_raises_for_another_reason(guard: Guard) -> None:
    def body() -> None:
        model = Lengths()
        loss = loss_of(model, False)
        loss.backward()
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="second time"):
            loss.backward()

    assert guard(body).report.incidents == ()


def test_autocast_region_that_backward_runs_in(guard: Guard) -> None:
    """`backward` called inside the region: there its operators are cast, and the same in the replay."""

    def body() -> float:
        seed_everything()
        model = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.mse_loss(model(torch.ones(6, 4)), torch.full((6, 8), 40.0))
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    run = guard(body)
    found = [incident for incident in run.report.incidents if incident.phase == "backward"]
    assert [incident.cause for incident in found] == ["loss-scale-overflow"]
    assert found[0].evidence["finite_at_scale"] == run.result
