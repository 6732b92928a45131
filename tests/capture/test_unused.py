"""Whose doing an unused parameter is, and how much of the model: the numbers that make it a warning or a note."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from watching import Watched

Guard = Callable[..., Watched]
STEPS = 12


def trained(model: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
    def body() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

    return body


class Tied(nn.Module):
    """The output layer borrows the embedding's weight and is applied without its bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 60)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.inner(self.embed(x))), self.head.weight)


@pytest.mark.parametrize(("width", "severity"), [(32, "info"), (4, "warning")])
def test_bias_of_a_layer_whose_weight_is_trained(width: int, severity: str, guard: Guard) -> None:
    """60 of 3,036 elements are nothing; 60 of 320 are worth a look."""
    model = Tied(width)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randint(0, 60, (20,))), torch.randint(0, 60, (20,)))

    run = guard(trained(model, loss))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", severity)
    assert incident.evidence["parameters"] == ["head.bias"]
    assert (incident.evidence["left_by"], incident.evidence["elements"]) == ("sibling", 60)
    assert run.report.status == ("clean" if severity == "info" else "incidents")


class Sine(nn.Linear):
    """A layer of the script's own class."""


def test_a_constant_that_a_derivative_by_the_inputs_cannot_see(guard: Guard) -> None:
    """A network that is fitted by its gradient (SIREN's Poisson equation): its output's offset is free."""
    torch.manual_seed(0)
    model = nn.Sequential(Sine(2, 32), nn.Tanh(), Sine(32, 32), nn.Tanh(), Sine(32, 1))

    def loss() -> Tensor:
        x = torch.randn(20, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope - x.detach()).square().mean()

    (incident,) = guard(trained(model, loss)).report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", "info")
    assert incident.evidence["parameters"] == ["4.bias"]


class Forgotten(nn.Module):
    """A small head of the script's own that forward never calls, beside a large body."""

    def __init__(self, as_parameter: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 400)
        self.out = nn.Linear(400, 3)
        if as_parameter:
            self.temperature = nn.Parameter(torch.ones(1))
        else:
            self.centerness = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.body(x)))


@pytest.mark.parametrize("as_parameter", [True, False])
def test_what_the_script_made_and_forgot_is_a_warning_however_small(as_parameter: bool, guard: Guard) -> None:
    model = Forgotten(as_parameter)
    run = guard(trained(model, lambda: F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 3, (6,)))))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", "warning")
    assert incident.evidence["left_by"] == "script"
    assert incident.evidence["share"] < 0.05


def test_pooler_that_a_library_model_brings_along_is_a_note(guard: Guard) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=512
    )
    bert, head = transformers.BertModel(config), nn.Linear(32, 3)
    model = nn.ModuleDict({"bert": bert, "head": head})

    def loss() -> Tensor:
        hidden = bert(torch.randint(0, 300, (4, 6))).last_hidden_state
        return F.cross_entropy(head(hidden.mean(1)), torch.randint(0, 3, (4,)))

    run = guard(trained(model, loss))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, run.report.status) == ("unused-parameters", "info", "clean")
    assert incident.evidence["left_by"] == "library"
    assert incident.fixes[0].action == "wait"


def test_pooler_of_the_smallest_encoder_is_a_note(guard: Guard) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    bert = transformers.BertModel(config)
    run = guard(trained(bert, lambda: bert(torch.randint(0, 20, (4, 6))).last_hidden_state.pow(2).mean()))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, run.report.status) == ("unused-parameters", "info", "clean")


def test_a_large_part_of_a_library_model_is_a_warning(guard: Guard) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16,
    )  # fmt: skip
    bert = transformers.BertModel(config)

    def loss() -> Tensor:  # of two blocks only the first is asked
        return bert(torch.randint(0, 20, (4, 6)), output_hidden_states=True).hidden_states[1].pow(2).mean()

    run = guard(trained(bert, loss))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", "warning")
    assert incident.evidence["share"] > 0.15


def test_pooler_of_a_library_that_another_environment_holds_is_a_note(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environments build on one another: a cluster's own modules, a folder on PYTHONPATH."""
    package = tmp_path / "shared" / "lib" / "site-packages"
    package.mkdir(parents=True)
    (package / "library_of_models.py").write_text(
        "from torch import nn\n\nclass Encoder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body, self.pooler = nn.Linear(8, 400), nn.Linear(8, 1)\n\n"
        "    def forward(self, x):\n        return self.body(x)\n"
    )
    monkeypatch.syspath_prepend(str(package))
    model = importlib.import_module("library_of_models").Encoder()
    run = guard(trained(model, lambda: model(torch.randn(6, 8)).pow(2).mean()))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", "info")


def freezing(model: nn.Sequential, frozen: list[Tensor], steps: int, with_scaler: bool = False) -> None:
    """Some layers are frozen as DINO freezes its last one: their gradients are dropped before the optimizer steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=with_scaler)
    for _ in range(steps):
        scaler.scale(model(torch.randn(4, 8)).pow(2).mean()).backward()
        for p in frozen:
            p.grad = None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("steps", [8, STEPS, 40])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_parameters_whose_gradients_the_script_drops_are_used(steps: int, with_scaler: bool, guard: Guard) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    run = guard(lambda: freezing(model, list(model[2].parameters()), steps, with_scaler))
    assert "unused-parameters" not in run.causes


def test_parameters_that_no_loss_reaches_are_told_beside_frozen_ones(guard: Guard) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].register_parameter("forgotten", nn.Parameter(torch.ones(3)))
    run = guard(lambda: freezing(model, list(model[2].parameters()), STEPS))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.evidence["parameters"]) == ("unused-parameters", ["0.forgotten"])


def test_gradients_that_are_all_dropped_are_no_frozen_layer(guard: Guard) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    run = guard(lambda: freezing(model, list(model.parameters()), STEPS))
    assert run.causes == ["no-gradients"]


def test_two_optimizers_one_with_a_layer_that_is_frozen_for_a_time(guard: Guard) -> None:
    maker, critic = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    opt_m, opt_c = torch.optim.SGD(maker.parameters(), 1e-3), torch.optim.SGD(critic.parameters(), 1e-3)

    def body() -> None:
        for _ in range(STEPS):
            fake = maker(torch.randn(4, 8))
            opt_c.zero_grad()
            critic(fake.detach()).mean().backward()
            critic[2].weight.grad = None
            opt_c.step()
            opt_m.zero_grad()
            critic(fake).mean().neg().backward()
            opt_m.step()

    assert guard(body).causes == []


@pytest.mark.parametrize("here", [0, 1, 2])
def test_parameters_that_other_ranks_hold_want_no_gradient(here: int, guard: Guard) -> None:
    """As FSDP1 leaves them with use_orig_params: no element, no gradient. A rank may hold none at all."""
    held = [nn.Parameter(torch.randn(3 if i < here else 0)) for i in range(2)]

    def body() -> None:
        optimizer = torch.optim.AdamW(held, lr=1e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = sum((p.square().sum() for p in held if p.numel()), torch.zeros((), requires_grad=True))
            assert isinstance(loss, Tensor)
            loss.backward()
            optimizer.step()

    assert guard(body).report.incidents == ()


class Probed(nn.Module):
    """A backbone that is called without a graph, as long as only the head is trained; `forgets` leaves it so."""

    def __init__(self, forgets: bool) -> None:
        super().__init__()
        self.forgets = forgets
        self.backbone, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.forgets and self.backbone.weight.requires_grad):
            hidden = torch.relu(self.backbone(x))
        return self.head(hidden)


def unfreezes(forgets: bool, is_held: bool) -> Callable[[], None]:
    def body() -> None:
        torch.manual_seed(0)
        model = Probed(forgets)
        model.backbone.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters() if is_held else model.head.parameters(), lr=1e-3)
        for step in range(36):
            if step == 12:
                model.backbone.requires_grad_(True)
                if not is_held:
                    optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-4})
            x = torch.randn(16, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()

    return body


@pytest.mark.parametrize("is_held", [False, True])
def test_unfrozen_and_still_called_without_a_graph(is_held: bool, guard: Guard) -> None:
    run = guard(unfreezes(forgets=True, is_held=is_held))
    assert run.causes == ["unused-parameters"]
    assert (run.first.severity, run.first.module) == ("warning", "backbone")
    assert run.first.step in ((12,) if not is_held else range(12, 33))
    assert run.first.evidence["parameters"] == ["backbone.weight", "backbone.bias"]


@pytest.mark.parametrize("is_held", [False, True])
def test_unfrozen_and_trained_from_there_on(is_held: bool, guard: Guard) -> None:
    assert guard(unfreezes(forgets=False, is_held=is_held)).causes == []


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.heads = nn.ModuleDict({"value": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return torch.cat([head(hidden) for head in self.heads.values()], 1)


def grows(
    then: Callable[[Growing, torch.optim.Optimizer], None], each: Callable[[Growing], None]
) -> Callable[[], None]:
    """A head is added in step 13. `then`: what is done about it there; `each`: in each step."""

    def body() -> None:
        torch.manual_seed(0)
        model = Growing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(36):
            if step == 13:
                model.heads["policy"] = nn.Linear(8, 2)
                then(model, optimizer)
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
            each(model)

    return body


def nothing(model: Growing, optimizer: Any = None) -> None: ...


def joins(model: Growing, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": list(model.heads["policy"].parameters())})


def is_frozen(model: Growing, optimizer: torch.optim.Optimizer) -> None:
    model.heads["policy"].requires_grad_(False)


def moves_it(model: Growing) -> None:
    with torch.no_grad():
        for p in model.heads["policy"].parameters() if "policy" in model.heads else ():
            assert p.grad is not None
            p.sub_(1e-3 * p.grad)
            p.grad = None


def test_a_head_that_is_added_and_belongs_to_no_optimizer(guard: Guard) -> None:
    run = guard(grows(nothing, nothing))
    assert run.causes == ["stale-parameters"]
    assert (run.first.severity, run.first.step, run.first.module) == ("warning", 13, "heads.policy")
    assert "were not there when training began" in run.first.explanation
    assert "add_param_group" in run.first.fixes[0].how


@pytest.mark.parametrize(("then", "each"), [(joins, nothing), (is_frozen, nothing), (nothing, moves_it)])
def test_a_head_that_is_added_and_cared_for(then: Any, each: Any, guard: Guard) -> None:
    assert guard(grows(then, each)).causes == []


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.inner = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.embed(tokens))))


@pytest.mark.parametrize("ties", [True, False])
def test_weights_that_are_tied_after_the_optimizer_was_built(ties: bool, guard: Guard) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Language()
        forgotten = nn.Parameter(torch.zeros(20, 8))
        held = model.parameters() if ties else [*model.parameters(), forgotten]
        optimizer = torch.optim.AdamW(held, lr=1e-3)
        model.out.weight = model.embed.weight
        for _ in range(STEPS):
            optimizer.zero_grad()
            tokens = torch.randint(0, 20, (6, 5))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()

    (incident,) = guard(body).report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", "info" if ties else "warning")
    if ties:
        assert "weights were tied after the optimizer was built" in incident.explanation


class Experts(nn.Module):
    """Each row goes to one of four experts; the last one's score is far below the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        nn.init.constant_(self.gate.bias.data[3:], -50.0)

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = chosen == n
            if rows.any():
                out[rows] = weight[rows, None] * expert(x[rows])
        return out


def test_an_expert_that_nothing_is_routed_to(guard: Guard) -> None:
    torch.manual_seed(0)
    model = Experts()
    run = guard(trained(model, lambda: model(torch.randn(64, 6)).square().mean()))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.module) == ("unused-parameters", "experts.3")
    assert "3 more in the same list" in incident.explanation
    assert "router" in incident.fixes[0].how


def test_a_head_that_is_built_like_no_other(guard: Guard) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(6, 6), "left": nn.Linear(6, 5)})
    run = guard(trained(model, lambda: model["used"](torch.randn(64, 6)).square().mean()))
    (incident,) = run.report.incidents
    assert "router" not in incident.fixes[0].how


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_that_is_given_nothing_that_wants_a_gradient(guard: Guard, reentrant: bool) -> None:
    """PyTorch warns of it; the fix is not to look for a `detach`."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 64).requires_grad_(False)
            self.block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            self.head = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.block, self.stem(x), use_reentrant=reentrant))

    def body() -> None:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            net(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = guard(body)
    assert run.faults == 0, run.stderr
    if not reentrant:
        assert not run.report.incidents
        return
    (incident,) = run.report.incidents
    assert incident.cause == "unused-parameters"
    assert "checkpoint(..., use_reentrant=False) at test_unused.py" in incident.fixes[0].how


class Block(nn.Module):
    """A wide residual network's: where the width changes, the shortcut is normalised by the layer before, and not here."""

    def __init__(self, width: int, has_norm: bool, has_way_out: bool = True) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.way_out = nn.Linear(width, width)
        self.has_norm, self.has_way_out = has_norm, has_way_out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(self.norm(x) if self.has_norm else x)
        return self.way_out(x) if self.has_way_out else x


class Tree(nn.Module):
    """Deep layer aggregation's: a tree of trees makes a projection that the trees in it do not ask for."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Linear(64, 1), nn.LayerNorm(1))
        self.inner = Tree(depth - 1) if depth else Block(64, has_norm=True)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.depth else self.inner(x) + self.project(x)


def test_a_block_whose_other_parameters_hang_in_blocks_of_its_own(guard: Guard) -> None:
    model = Tree(1)
    run = guard(trained(model, lambda: model(torch.randn(8, 64)).square().mean()))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity, incident.evidence["left_by"]) == ("unused-parameters", "info", "variant")
    assert "`project.0.weight`" in incident.explanation


@pytest.mark.parametrize(
    ("blocks", "severity", "left_by"),
    [
        ([(True, True), (False, True), (True, True)], "info", "variant"),
        ([(False, True), (False, True), (False, True)], "warning", "script"),  # by nobody's example
        ([(True, True), (True, False), (True, True)], "warning", "variant"),  # a sixth of the network
    ],
    ids=["norm of one", "norm of all", "layer of one"],
)
def test_blocks_that_leave_a_layer_out(
    blocks: list[tuple[bool, bool]], severity: str, left_by: str, guard: Guard
) -> None:
    model = nn.Sequential(*(Block(64, *each) for each in blocks))
    run = guard(trained(model, lambda: model(torch.randn(8, 64)).square().mean()))
    (incident,) = run.report.incidents
    assert (incident.cause, incident.severity) == ("unused-parameters", severity)
    assert incident.evidence["left_by"] == left_by
