"""What the drop-ins cannot be given: an error of our own says what it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampguard.errors import LossError, PrecisionError, SetupError
from ampguard.integrations.hf import prepare
from ampguard.integrations.timm import NativeScaler, NativeScalerWithGradNormCount


@pytest.mark.parametrize("scaler_class", [NativeScaler, NativeScalerWithGradNormCount])
def test_native_scalers(scaler_class: type) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 4)).mean()
    scaler = scaler_class()
    with pytest.raises(LossError, match="needs no gradient"):
        scaler(loss.detach(), optimizer)
    with pytest.raises(LossError, match=r"the scaler takes a loss tensor, not a float\n.*loss\.item"):
        scaler(loss.item(), optimizer)
    with pytest.raises(SetupError, match="a NoneType is no optimizer"):
        scaler(loss, None)
    assert scaler(loss, optimizer) > 0


def test_prepare_of_a_model() -> None:
    with pytest.raises(SetupError, match="takes an Accelerator or a transformers Trainer, not a Linear"):
        prepare(nn.Linear(4, 1))


def test_a_device_that_is_none() -> None:
    pytest.importorskip("lightning")
    from ampguard.integrations.lightning import GuardedPrecision

    with pytest.raises(PrecisionError, match="'gpu' is no device"):
        GuardedPrecision("16-mixed", "gpu")
