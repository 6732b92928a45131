"""`--amp-opt-level` and its relatives, on parsers of our own and on those that have such options already."""

from __future__ import annotations

import argparse

import pytest
import torch
from digits_loops import batches, network, train
from torch import nn

from ampguard.errors import UsageError
from ampguard.integrations.arguments import add_amp_arguments, amp_of, level_of
from ampguard.integrations.timm import NativeScalerWithGradNormCount


def level(words: str, default: str = "O1") -> str:
    parser = argparse.ArgumentParser()
    add_amp_arguments(parser, default)
    return level_of(parser.parse_args(words.split()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "O1"),
        ("--amp-opt-level O0", "O0"),
        ("--amp-opt-level O3", "O3"),
        ("--amp_opt_level bf16", "bf16"),
        ("--disable-amp", "O0"),
        ("--disable_amp", "O0"),
        ("--disable_amp --amp-opt-level O0", "O0"),
        ("--enable_amp", "O1"),
    ],
)
def test_levels(words: str, expected: str) -> None:
    assert level(words) == expected


def test_defaults() -> None:
    assert level("", "bf16") == "bf16"
    assert level("--enable-amp", "bf16") == "bf16"
    assert (level("", "O0"), level("--enable-amp", "O0")) == ("O0", "O1")  # SimMIM's config
    assert level_of(argparse.Namespace()) == "O1"
    with pytest.raises(UsageError, match="O0, O1, O2, O3, bf16"):
        level("", "O4")


@pytest.mark.parametrize(
    "words", ["--disable-amp --amp-opt-level O2", "--disable_amp --enable-amp", "--enable-amp --amp-opt-level O0"]
)
def test_contradictions(words: str) -> None:
    with pytest.raises(UsageError, match="contradict each other"):
        level(words)


def test_swins_parser_gains_the_levels() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disable_amp", action="store_true", help="Disable pytorch amp")
    parser.add_argument("--amp-opt-level", type=str, choices=["O0", "O1", "O2"], help="deprecated!")
    parser.add_argument("--tag")
    add_amp_arguments(parser)
    args = parser.parse_args(["--amp-opt-level", "bf16", "--tag", "x"])
    assert (level_of(args), args.tag, args.disable_amp) == ("bf16", "x", False)
    with pytest.raises(argparse.ArgumentError, match="--tag"):
        parser.add_argument("--tag")  # the parser minds its other options as before


def test_simmims_parser_gains_the_levels() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-amp", action="store_true")
    parser.add_argument("--disable-amp", action="store_false", dest="enable_amp")
    parser.set_defaults(enable_amp=True)
    add_amp_arguments(parser)
    assert level_of(parser.parse_args([])) == "O1"
    assert level_of(parser.parse_args(["--disable-amp"])) == "O0"


@pytest.mark.parametrize(
    ("words", "dtype", "scale"),
    [
        ("--disable_amp", torch.float32, 1.0),
        ("--amp-opt-level bf16", torch.bfloat16, 1.0),
        ("", torch.float16, 2.0**16),
    ],
)
def test_autocast_and_scaler_go_together(words: str, dtype: torch.dtype, scale: float) -> None:
    parser = argparse.ArgumentParser()
    add_amp_arguments(parser)
    amp = amp_of(parser.parse_args(words.split()), "cpu")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    amp.prepare(model, optimizer)
    loss_scaler = NativeScalerWithGradNormCount(precision=amp)
    seen = []
    model[-1].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    for x, y in batches(2):
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        assert loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters()) is not None
        optimizer.zero_grad()
    assert seen == [dtype] * 2
    assert loss_scaler.state_dict()["scale"] == amp.scaler.get_scale() == scale
    assert amp.scaler.is_enabled() == (scale != 1.0)
    train(loss_scaler, model, optimizer, 2, dtype=dtype)
