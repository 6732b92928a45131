"""The gradients of a recorded step are replayed bit for bit: whatever module and whatever loss they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_bits import STEPS, Shifted, mlp, overflow, replays_bitwise, spoil, training
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from watching import seed_everything

# --- losses outside the modules --------------------------------------------------------------------------------------


def cross_entropy(model: nn.Module, step: int) -> Tensor:
    return F.cross_entropy(spoil(model(torch.randn(6, 4)), step), torch.randint(0, 5, (6,)), label_smoothing=0.1)


def weighted_cross_entropy(model: nn.Module, step: int) -> Tensor:
    target = torch.randint(0, 5, (6,))
    target[2] = -100
    return F.cross_entropy(spoil(model(torch.randn(6, 4)), step), target, weight=torch.arange(1.0, 6.0))


def binary(model: nn.Module, step: int) -> Tensor:
    probability = spoil(model(torch.randn(6, 4)), step).sigmoid()
    return F.binary_cross_entropy(probability, torch.rand(6, 5)) + F.binary_cross_entropy_with_logits(
        model(torch.randn(6, 4)), torch.rand(6, 5), pos_weight=torch.full((5,), 2.0)
    )


def ctc(model: nn.Module, step: int) -> Tensor:
    logits = spoil(model(torch.randn(7, 3, 4)), step).log_softmax(-1)
    return F.ctc_loss(logits, torch.randint(1, 5, (3, 2)), torch.full((3,), 7), torch.full((3,), 2))


TEACHER = nn.Linear(4, 5)


def distilled(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(6, 4)
    with torch.no_grad():
        teacher = TEACHER(x)
    student = spoil(model(x), step)
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean") + F.mse_loss(
        student, teacher.detach()
    )


def mixed_dtypes(model: nn.Module, step: int) -> Tensor:
    out = spoil(model(torch.randn(6, 4)), step)
    low = (out.half() * 0.5).pow(2).mean()
    wide = (out.double() - 1).abs().mean()
    return low.float() + wide.float() + out.bfloat16().sum().float() * 1e-3


def in_place_chain(model: nn.Module, step: int) -> Tensor:
    out = spoil(model(torch.randn(6, 4)), step) * 1.0
    out.mul_(0.5).add_(1.0)
    out[:, 0] = out[:, 1].detach() * 2
    out.masked_fill_(out > 1.2, 0.0)
    total = torch.zeros(())
    for row in out:
        total += row.pow(2).sum()
    total /= len(out)
    return total


def filled_row_by_row(model: nn.Module, step: int) -> Tensor:
    """A result that is made beforehand and filled in a loop."""
    out = spoil(model(torch.randn(6, 4)), step)
    states = torch.zeros(6, 5)
    for row in range(6):
        states[row] = out[row] + (states[row - 1] if row else 0.0)
    return states.pow(2).mean()


def normalized(model: nn.Module, step: int) -> Tensor:
    a, b = (F.normalize(spoil(model(torch.randn(6, 4)), step), dim=-1) for _ in range(2))
    return F.cross_entropy(a @ b.t() / 0.07, torch.arange(6))


def dict_of_losses(model: nn.Module, step: int) -> Tensor:
    out = model(torch.randn(6, 4))
    losses = {"a": out.abs().mean(), "b": spoil(out, step).pow(2).mean(), "c": F.smooth_l1_loss(out, out.detach() + 1)}
    weights = {"a": 0.1, "b": 1.0, "c": 2.0}
    return sum(losses[key] * weights[key] for key in losses)  # type: ignore[return-value]


def indexed(model: nn.Module, step: int) -> Tensor:
    out = spoil(model(torch.randn(6, 4)), step)
    rows = torch.tensor([0, 2, 2, 5])
    picked = out[rows].gather(1, torch.tensor([[0], [1], [4], [2]]))
    return picked.pow(2).mean() + out[out > 0].mean() + out.topk(2, -1).values.sum() * 0.1 + out.scatter_add(
        0, torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 5)
    ).mean()  # fmt: skip


def infinite(model: nn.Module, step: int) -> Tensor:
    return overflow(model(torch.randn(6, 4)), step).mean()


def with_noise(model: nn.Module, step: int) -> Tensor:
    out = spoil(model(torch.randn(6, 4)), step)
    return F.dropout(out * torch.rand_like(out), 0.3).pow(2).mean() + torch.randn(()) * out.mean()


LOSSES: dict[str, Callable[[nn.Module, int], Tensor]] = {
    "cross-entropy": cross_entropy, "weighted cross-entropy": weighted_cross_entropy, "binary": binary, "CTC": ctc,
    "distilled": distilled, "several precisions": mixed_dtypes, "in-place chain": in_place_chain,
    "filled row by row": filled_row_by_row, "normalized": normalized, "dict of losses": dict_of_losses,
    "indexed": indexed, "infinite": infinite, "noise": with_noise,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss_outside_the_modules(name: str, tmp_path: Path) -> None:
    seed_everything()
    replays_bitwise(training(mlp(4, 8, 5), LOSSES[name]), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["cross-entropy", "distilled", "normalized", "dict of losses"])
def test_loss_under_autocast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    seed_everything()

    def in_low_precision(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return LOSSES[name](model, step)

    replays_bitwise(training(mlp(4, 8, 5), in_low_precision), tmp_path)


def test_float32_loss_behind_an_autocast_region(tmp_path: Path) -> None:
    seed_everything()

    def contrastive(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(6, 4))
        out = spoil(out.float(), step)
        return F.cross_entropy(out @ out.t(), torch.arange(6))

    replays_bitwise(training(mlp(4, 8, 5), contrastive), tmp_path)


# --- modules ---------------------------------------------------------------------------------------------------------


class Spoils(nn.Module):
    """A network and, behind it, the bad derivative: told the step by the argument."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.second(spoil(self.first(x), step))


class Sequence(nn.Module):
    """The first result of a recurrent network or of an attention."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x, x, x) if isinstance(self.net, nn.MultiheadAttention) else self.net(x))[0]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class Doubled(torch.autograd.Function):
    """A derivative that is not that of the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.sign() * 3


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def backward_hooked() -> nn.Module:
    net = mlp(8, 8, 8)
    net[0].register_full_backward_hook(lambda module, given, made: tuple(g * 0.5 for g in given))
    net[2].register_full_backward_pre_hook(lambda module, made: tuple(g * 2 for g in made))
    return net


class Hooked(nn.Module):
    """Reverses a gradient by a hook on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: -0.3 * gradient)
        return h.tanh()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm and dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4)),
    "batch norm without momentum": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)),
    "layer norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.MaxPool1d(2), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.Linear(16, 8),
    ),
    "recurrent": lambda: Sequence(nn.LSTM(8, 8, num_layers=2, dropout=0.2)),
    "attention": lambda: Sequence(nn.MultiheadAttention(8, 2, dropout=0.2)),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "checkpoint, reentrant": lambda: Checkpointed(True),
    "checkpoint, not reentrant": lambda: Checkpointed(False),
    "custom function": lambda: nn.Sequential(nn.Linear(8, 8), Applies(), nn.Linear(8, 8)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "backward hooks": backward_hooked,
    "hook on an activation": Hooked,
}  # fmt: skip
SEQUENCES = {"recurrent", "attention", "transformer layer"}
NO_HALF = {"recurrent"}


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    if dtype is not None and name in NO_HALF:
        pytest.skip("PyTorch has no float16 LSTM on this device")
    seed_everything()
    model = Spoils(nn.Sequential(nn.Linear(8, 8), MODULES[name]()), nn.Sequential(MODULES[name](), nn.Linear(8, 3)))
    shape = (4, 5, 8) if name in SEQUENCES else (6, 8)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype or torch.float16, enabled=dtype is not None):
            return model(torch.randn(*shape), step).float().pow(2).mean()

    replays_bitwise(training(model, loss_of), tmp_path)


class Embeds(nn.Module):
    def __init__(self, sparse: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, step: int) -> Tensor:
        return self.head(spoil(self.embed(tokens), step))


@pytest.mark.parametrize(("sparse", "tied"), [(True, False), (False, True)], ids=["sparse", "tied"])
def test_embedding(sparse: bool, tied: bool, tmp_path: Path) -> None:
    seed_everything()
    tokens = torch.tensor([1, 2, 2, 5])
    model = Embeds(sparse, tied)
    replays_bitwise(training(model, lambda m, step: F.cross_entropy(m(tokens, step), tokens)), tmp_path)


def test_weights_tied_between_two_root_modules(tmp_path: Path) -> None:
    seed_everything()
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    model = nn.ModuleList([embed, head])
    tokens = torch.tensor([1, 2, 2, 5])
    replays_bitwise(
        training(model, lambda m, step: F.cross_entropy(head(spoil(embed(tokens), step)), tokens)), tmp_path
    )


def test_frozen_parts(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 8, 5)
    for parameter in [*model[0].parameters(), model[2].bias]:
        parameter.requires_grad_(False)

    def body() -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(STEPS):
            cross_entropy(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    replays_bitwise(body, tmp_path)


def test_part_that_gets_no_gradient(tmp_path: Path) -> None:
    seed_everything()
    model = nn.ModuleDict({"used": mlp(4, 5), "unused": mlp(4, 5), "detached": mlp(4, 5)})

    def loss_of(_: nn.Module, step: int) -> Tensor:
        return cross_entropy(lambda x: model["used"](x) + model["detached"](x).detach(), step)  # type: ignore[arg-type]

    replays_bitwise(training(model, loss_of), tmp_path)


# --- several modules, parameters outside modules ---------------------------------------------------------------------


def test_encoder_and_decoder(tmp_path: Path) -> None:
    seed_everything()
    encoder, decoder, prior = mlp(4, 8, 6), mlp(3, 8, 4), mlp(3, 3)
    model = nn.ModuleList([encoder, decoder, prior])

    def vae(_: nn.Module, step: int) -> Tensor:
        x = torch.randn(6, 4)
        mean, log_variance = encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1)
        return F.mse_loss(decoder(spoil(z, step)), x) + kl.mean() + prior(z).pow(2).mean()

    replays_bitwise(training(model, vae), tmp_path)


def test_parameters_used_outside_their_modules(tmp_path: Path) -> None:
    seed_everything()

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = nn.Linear(4, 5), nn.Linear(3, 5)
            self.temperature = nn.Parameter(torch.tensor(1.0))

    model = Clip()

    def loss_of(_: nn.Module, step: int) -> Tensor:
        image, text = F.normalize(model.image(torch.randn(6, 4)), dim=-1), model.text(torch.randn(6, 3))
        logits = model.temperature.exp() * image @ spoil(text, step).t()
        decay = sum(p.pow(2).sum() for p in model.parameters())
        return F.cross_entropy(logits, torch.arange(6)) + 1e-3 * decay + model.text.weight.abs().mean()

    replays_bitwise(training(model, loss_of), tmp_path)


class KeepsLoss(nn.Module):
    """Leaves a part of the loss, and what another part is made of, in attributes (a mixture of experts, a VAE)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 5)
        self.balance, self.hidden = torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.stem(x).tanh()
        self.balance = self.hidden.pow(2).mean()
        return self.head(self.hidden)  # type: ignore[no-any-return]


def test_loss_that_a_module_keeps(tmp_path: Path) -> None:
    seed_everything()
    net = KeepsLoss()
    model = Shifted(net)

    def loss_of(_: nn.Module, step: int) -> Tensor:
        out = net(torch.randn(6, 4))
        return out.pow(2).mean() + 0.1 * net.balance + net.hidden.abs().mean() + model.spoilt(step)

    replays_bitwise(training(model, loss_of), tmp_path)


def test_functional_model_without_modules(tmp_path: Path) -> None:
    seed_everything()
    weights = [torch.randn(8, 4, requires_grad=True), torch.randn(5, 8, requires_grad=True)]
    bias = nn.Parameter(torch.zeros(5))

    def body() -> None:
        optimizer = torch.optim.SGD([*weights, bias], lr=0.01)
        for step in range(STEPS + 1):  # the first step tells that there is no module
            optimizer.zero_grad()
            hidden = F.linear(torch.randn(6, 4), weights[0]).relu()
            F.cross_entropy(spoil(F.linear(hidden, weights[1], bias), step - 1), torch.arange(6) % 5).backward()
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_functional_call(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)
    scale = nn.Parameter(torch.tensor(1.5))

    def body() -> None:
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            state = {name: p * scale for name, p in model.named_parameters()}
            out = torch.func.functional_call(model, state, (torch.randn(6, 4),))
            F.cross_entropy(spoil(out, step), torch.arange(6) % 5).backward()
            optimizer.step()

    replays_bitwise(body, tmp_path)


def test_custom_function_outside_modules(tmp_path: Path) -> None:
    seed_everything()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        out = model(torch.randn(6, 4))
        return Doubled.apply(spoil(Doubled.apply(out) * 0.5, step)).pow(2).mean()  # type: ignore[no-any-return,no-untyped-call]

    replays_bitwise(training(mlp(4, 8, 5), loss_of), tmp_path)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_function", [True, False])
def test_checkpoint_around_a_root_module(is_function: bool, use_reentrant: bool, tmp_path: Path) -> None:
    seed_everything()
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 5))
    model = Shifted(net)

    def part(x: Tensor) -> Tensor:
        return net(x).tanh() * 2.0  # type: ignore[no-any-return]

    def loss_of(_: nn.Module, step: int) -> Tensor:
        x = torch.randn(6, 4, requires_grad=True)
        out = checkpoint(part if is_function else net, x, use_reentrant=use_reentrant)
        return out.pow(2).mean() + model.spoilt(step)

    replays_bitwise(training(model, loss_of), tmp_path)


@pytest.mark.parametrize("where", ["output", "glue", "removed before", "removed after"])
def test_hooks_on_tensors_outside_modules(where: str, tmp_path: Path) -> None:
    """A hook that changes the gradient, and counts how often it ran: a replay is not to be counted."""
    seed_everything()
    net = mlp(4, 8, 5)
    model = Shifted(net)
    ran, times, handles = [], 0, []

    def hook(gradient: Tensor) -> Tensor:
        nonlocal times
        times += 1
        ran.append(gradient.shape)
        return gradient * 0.25

    def loss_of(_: nn.Module, step: int) -> Tensor:
        if where == "removed after" and handles:
            handles.pop().remove()
        out = net(torch.randn(6, 4))
        hooked = out.square() if where == "glue" else out
        handles.append(hooked.register_hook(hook))
        if where == "removed before":
            handles.pop().remove()
        return hooked.pow(2).mean() + model.spoilt(step)

    replays_bitwise(training(model, loss_of), tmp_path)
    assert len(ran) == times == (0 if where == "removed before" else STEPS)


def test_hooks_on_parameters(tmp_path: Path) -> None:
    seed_everything()
    model = mlp(4, 8, 5)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    replays_bitwise(training(model, cross_entropy), tmp_path)
