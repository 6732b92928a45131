"""FSDP computes in a type that its parameters do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from watching import Watched

from ampguard import compat

Guard = Callable[..., Watched]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(kind: str, dtype: torch.dtype | None) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if kind == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (1,))
        return fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    return FullyShardedDataParallel(
        net, mixed_precision=MixedPrecision(param_dtype=dtype), device_id=torch.device("cpu")
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_a_scaler_for_what_fsdp_computes_in_float16(
    kind: str, dtype: torch.dtype | None, alone: None, guard: Guard
) -> None:
    torch.manual_seed(0)
    model = sharded(kind, dtype)
    assert compat.sharded_compute_dtypes(model) == ({dtype} if dtype is not None else set())

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(12):
            loss = model(torch.randn(6, 4)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    assert guard(body).causes == ([] if dtype is not None else ["needless-scaler"])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_fix_for_what_fsdp_computes_in_float16_is_its_policy(alone: None, guard: Guard) -> None:
    """`model.to(torch.bfloat16)` would be undone: the policy casts what is computed with."""
    torch.manual_seed(0)
    model = sharded("FSDP2", torch.float16)

    def body() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(8):
            loss = model(torch.randn(6, 4) * (1e6 if step == 5 else 1.0)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    incident = guard(body).report.incidents[0]
    assert (incident.cause, incident.step) == ("fp16-overflow", 5)
    told = {fix.action: (fix.how, fix.verified) for fix in incident.fixes}
    assert told["use-bf16"] == (
        "use bfloat16, which has float32's range: MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        True,
    )
    assert told["disable-amp"] == ("compute in float32: MixedPrecisionPolicy(param_dtype=torch.float32)", True)
