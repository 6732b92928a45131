"""What PyTorch promises of autocast on the CPU holds under the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from installed import installed
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Holds = Callable[[Callable[[], Any]], None]
half, bf16 = torch.float16, torch.bfloat16

LISTS = {
    "torch_16": (torch, None),
    "torch_fp32": (torch, torch.float32),
    "torch_need_autocast_promote": (torch, torch.float32),
    "nn_16": (torch._C._nn, None),
    "nn_fp32": (torch._C._nn, torch.float32),
}
"""PyTorch's lists of operators: where they live, and the type that autocast must give (None: its low precision)."""


def in_type(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(in_type(v, dtype) for v in value) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("dtype", [half, bf16], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_operators_of_pytorchs_lists(name: str, dtype: torch.dtype, holds: Holds) -> None:
    """Each operator returns autocast's type, and what it returns with its operands cast by hand outside autocast."""
    owner, wanted = LISTS[name]

    def body() -> list[Any]:
        lists = installed("autocast_test_lists", "AutocastCPUTestLists")(torch.device("cpu"))
        nn.Linear(1, 1)(torch.zeros(1, 1)).sum()  # from here on, operators outside modules are recorded
        results = []
        for entry in getattr(lists, name, []):
            operator, args = getattr(owner, entry[0], None), entry[1]
            kwargs = entry[2] if len(entry) > 2 and isinstance(entry[2], dict) else {}
            if operator is None:
                continue
            try:
                with torch.autocast("cpu", dtype=dtype):
                    output = operator(*args, **kwargs)
                assert not torch.is_autocast_enabled("cpu")
                control = operator(*in_type(args, wanted or dtype), **kwargs)
            except RuntimeError as refusal:  # no such kernel in this type on this device
                results.append([entry[0], str(refusal)])
                continue
            if isinstance(output, Tensor):
                assert output.dtype == (wanted or dtype), entry[0]
                torch.testing.assert_close(output, control, equal_nan=True)
            results.append([entry[0], output])
        assert any(isinstance(output, Tensor) for _, output in results) or dtype == half
        assert results
        return results

    holds(body)


def test_nested_regions(holds: Holds) -> None:
    def body() -> list[Any]:
        a, model, other = torch.randn(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=half):
            one = model(a) @ a
            assert one.dtype == half
            with torch.autocast("cpu", enabled=False):
                two = model(one.float()) @ a
                assert two.dtype == torch.float32
                with torch.autocast("cpu", dtype=bf16):
                    three = other(two) @ a  # (a weight's cast is cached for all regions around it, whatever their type)
                    assert three.dtype == bf16
                assert not torch.is_autocast_enabled("cpu")
            four = model(two) @ a
            assert four.dtype == half
        assert not torch.is_autocast_enabled("cpu")
        (one.float() + two + three.float() + four.float()).sum().backward()
        return [one, two, three, four, model.weight.grad, other.weight.grad]

    holds(body)


def test_region_left_by_an_exception(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.Linear(4, 4)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), torch.autocast("cpu", dtype=half):
            model(torch.ones(2, 3))
        assert not torch.is_autocast_enabled("cpu")
        out = model(torch.ones(2, 4))
        assert out.dtype == torch.float32
        return [out]

    holds(body)


def test_region_as_a_decorator(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.Linear(4, 4)

        @torch.autocast("cpu", dtype=half)
        def run(x: Tensor) -> Tensor:
            return model(x)

        out = run(torch.ones(2, 4))
        assert out.dtype == half
        out.float().sum().backward()
        return [out, model.weight.grad]

    holds(body)


class Counts(nn.Module):
    """How often a weight is cast in a region: once, where the cache is used."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(8, 8)), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = F.linear(x, self.weight)
        return x


def casts_in_graph(output: Tensor) -> int:
    """Different nodes of the graph that cast a weight."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return sum(1 for n in seen if n.name().startswith("ToCopy") and n.next_functions[0][0].name().endswith("Grad"))


@pytest.mark.parametrize("cached", [True, False])
def test_cache_of_casts(cached: bool, holds: Holds) -> None:
    def body() -> list[Any]:
        model = Counts(3)
        with torch.autocast("cpu", dtype=half, cache_enabled=cached):
            one = model(torch.randn(2, 8))
            two = model(torch.randn(2, 8))
            assert casts_in_graph(one + two) == (1 if cached else 6)
        with torch.autocast("cpu", dtype=half):
            three = model(torch.randn(2, 8))  # a new region, a new cast
        (one + two + three).float().sum().backward()
        return [one, two, three, model.weight.grad]

    holds(body)


def test_cast_made_without_gradients_is_kept(holds: Holds) -> None:
    """A known trap of PyTorch's: the guard must neither cure nor worsen it."""

    def body() -> list[Any]:
        model = nn.Linear(8, 8)
        with torch.autocast("cpu", dtype=half):
            with torch.no_grad():
                model(torch.randn(2, 8))
            out = model(torch.randn(2, 8))
            loss = out.float().pow(2).mean()
        if loss.requires_grad:
            loss.backward()
        return [loss, loss.requires_grad, model.weight.grad is None, model.weight.grad]

    holds(body)


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        assert torch.is_autocast_enabled("cpu")
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        assert torch.is_autocast_enabled("cpu")
        return gradient.mm(b.t()), a.t().mm(gradient)


class ProductInFloat32(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        assert not torch.is_autocast_enabled("cpu")
        assert a.dtype == b.dtype == torch.float32
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        assert not torch.is_autocast_enabled("cpu")
        return gradient.mm(b.t()), a.t().mm(gradient)


class Multiplies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(8, 8)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("where", ["module", "glue"])
@pytest.mark.parametrize("kind", [Product, ProductInFloat32], ids=["autocast", "float32"])
def test_custom_function(kind: type, where: str, holds: Holds) -> None:
    def body() -> list[Any]:
        model = Multiplies(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            with torch.autocast("cpu", dtype=half):
                out = model(x)
                if where == "glue":
                    out = kind.apply(out.float() if kind is ProductInFloat32 else out, model.weight)  # type: ignore[attr-defined]
            assert out.dtype == (torch.float32 if kind is ProductInFloat32 else half)
            out.float().pow(2).mean().backward()
            optimizer.step()
        return [model.weight, model.weight.grad]

    holds(body)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_computes_again_in_the_same_precision(use_reentrant: bool, holds: Holds) -> None:
    seen: list[torch.dtype] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
            return self.layer(x)

    def body() -> list[Any]:
        seen.clear()
        model = Block()
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=half):
            out = checkpoint(model, x, use_reentrant=use_reentrant)
        out.float().pow(2).mean().backward()
        assert seen == [half, half]
        return [out, x.grad, model.layer.weight.grad]

    holds(body)


def test_types_that_autocast_leaves_alone(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.Linear(4, 4)
        a, b = torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 9, (4, 4))
        with torch.autocast("cpu", dtype=half):
            out = model(torch.ones(2, 4))
            assert (a @ a).dtype == torch.float64
            assert (b @ b).dtype == torch.int64
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2)).dtype == torch.float32
            assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == half
        return [out, a @ a, b @ b]

    holds(body)


def test_cat_and_stack_promote(holds: Holds) -> None:
    def body() -> list[Any]:
        model = nn.Linear(4, 4)
        with torch.autocast("cpu", dtype=half):
            out = model(torch.ones(2, 4))
            together, stacked = torch.cat([out, torch.ones(2, 4)]), torch.stack([out, torch.ones(2, 4)])
            assert together.dtype == stacked.dtype == torch.float32
        together.sum().backward()
        return [together, stacked, model.weight.grad]

    holds(body)
