"""Combinations that go wrong here: each is tried, none is looked up in a list of versions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch

from ampguard.check.facts import Finding
from ampguard.numerics import dtype_name


def combinations() -> list[Finding]:
    """Every known-bad combination that this machine shows, in the order of `TRIALS`. Leaves random streams as they were."""
    state = torch.get_rng_state()
    found: list[Finding] = []
    try:
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            for trial in TRIALS:
                found.extend(trial())
    finally:
        torch.set_rng_state(state)
    return found


def scaler_of_another_device() -> Iterator[Finding]:
    """`GradScaler()` and `autocast("cuda")` are CUDA's: elsewhere they switch themselves off, with a warning at most."""
    if torch.amp.GradScaler("cuda").is_enabled():
        return
    yield Finding(
        "warning",
        "scaler-for-another-device",
        "torch.amp.GradScaler() is built for CUDA and is disabled here: float16 trains without loss scaling, after one warning. "
        "torch.autocast('cuda') does nothing here in the same way.",
        "look for GradScaler() without a device, torch.cuda.amp.GradScaler() and autocast('cuda'); write "
        "torch.amp.GradScaler(device.type) and torch.autocast(device.type, ...), with the model's own device. "
        "scaler.is_enabled() tells which one you have.",
    )


def autocast_keeps_half() -> Iterator[Finding]:
    """CPU autocast has no float32 list for exp, log, softmax and norms; CUDA's has one."""
    x = torch.full((2, 4), 12.0).half()
    operations: dict[str, Callable[[], torch.Tensor]] = {
        "exp": lambda: x.exp(),
        "sum": lambda: x.sum(),
        "softmax": lambda: x.softmax(-1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (4,)),
    }
    with torch.autocast("cpu", dtype=torch.float16):
        low = [name for name, run in operations.items() if run().dtype == torch.float16]
    if low:
        yield Finding(
            "note",
            "cpu-autocast-stays-low",
            f"autocast on the CPU leaves {', '.join(low)} in float16 where CUDA's computes them in float32: exp(12) is Inf.",
            "a script that is healthy on CUDA may overflow here; force float32 around these (ampguard run --force-fp32 PATTERN).",
        )


def float_is_undone() -> Iterator[Finding]:
    """`.float()` under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.ones(2, 2).float() @ torch.ones(2, 2).float()
    if product.dtype != torch.float32:
        yield Finding(
            "note",
            "float-is-undone",
            "x.float() inside an autocast region is undone by the next matrix product.",
            "leave autocast: with torch.autocast(device.type, enabled=False): ... x.float() ...",
        )


def masks_overflow() -> Iterator[Finding]:
    """A mask constant that does not fit float16."""
    scores = torch.zeros(4).half()
    silent = bool(torch.isinf(scores + (1 - torch.zeros(4).half()) * -1e9).any())
    try:
        scores.masked_fill(scores == 0, -1e9)
        refused = False
    except RuntimeError:
        refused = True
    if silent:
        yield Finding(
            "note",
            "mask-constant",
            "-1e9 in float16 becomes -Inf silently in arithmetic and torch.where"
            + (", and masked_fill refuses it" if refused else "")
            + "; a row that is masked everywhere then gives NaN.",
            "use torch.finfo(scores.dtype).min.",
        )


def adam_on_half_weights() -> Iterator[Finding]:
    """Adam's eps of 1e-8 is 0 in float16."""
    weight = torch.ones(4).half().requires_grad_()
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full((4,), 1e-5).half()
    optimizer.step()
    if not torch.isfinite(weight).all():
        yield Finding(
            "warning",
            "adam-on-float16-weights",
            "AdamW with its default eps=1e-8 makes float16 weights NaN or Inf in one step: eps is 0 there.",
            "keep float32 weights and use autocast, or eps=1e-4.",
        )


def updates_are_lost() -> Iterator[Finding]:
    """bfloat16 weights swallow small updates."""
    weight = torch.ones(4).bfloat16().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    if bool((weight == 1).all()):
        yield Finding(
            "warning",
            "lost-updates",
            "bfloat16 weights of 1.0 stay 1.0 through 200 updates of 0.001: each is below the spacing of the weights.",
            "keep float32 weights and use autocast (bf16), or an optimizer with stochastic rounding.",
        )


def masked_rows() -> Iterator[Finding]:
    """A query that may attend to nothing, on each way that attention is computed."""
    q = torch.ones(1, 1, 2, 8)
    nothing = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    fused = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=nothing)
    module = torch.nn.MultiheadAttention(8, 1, batch_first=True)
    with torch.no_grad():
        by_hand, _ = module(q[0], q[0], q[0], key_padding_mask=torch.ones(1, 2, dtype=torch.bool), need_weights=True)
    ways = {"scaled_dot_product_attention": fused, "nn.MultiheadAttention(need_weights=True)": by_hand}
    bad = [name for name, result in ways.items() if not torch.isfinite(result).all()]
    if bad:
        yield Finding(
            "note",
            "masked-rows",
            f"a row with every key masked is NaN in {' and '.join(bad)}.",
            "give every row at least one key, or drop fully padded samples.",
        )


def recurrent_layers() -> Iterator[Finding]:
    """Recurrent layers that a device cannot compute under autocast."""
    for dtype in (torch.float16, torch.bfloat16):
        raising = []
        for kind in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
            try:
                with torch.autocast("cpu", dtype=dtype):
                    kind(2, 2)(torch.zeros(1, 1, 2))
            except RuntimeError:
                raising.append(f"nn.{kind.__name__}")
        if raising:
            yield Finding(
                "note",
                "recurrent-under-autocast",
                f"a call of {' or '.join(raising)} that is to be differentiated raises RuntimeError under "
                f"{dtype_name(dtype)} autocast on the CPU.",
                "use bfloat16, or run them in float32: with torch.autocast(device.type, enabled=False): ... "
                "(ampguard run --precision fp16 does so).",
            )


def reduced_sums() -> Iterator[Finding]:
    """CUDA may add up float16 products in float16, and use TF32 for float32."""
    if not torch.cuda.is_available():
        return
    switches = torch.backends.cuda.matmul
    if getattr(switches, "allow_fp16_reduced_precision_reduction", False):
        yield Finding(
            "note",
            "float16-sums",
            "split sums of float16 matrix products may be added in float16 (allow_fp16_reduced_precision_reduction is on).",
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False where attention logits overflow.",
        )


TRIALS: tuple[Callable[[], Iterator[Finding]], ...] = (
    scaler_of_another_device,
    adam_on_half_weights,
    updates_are_lost,
    autocast_keeps_half,
    float_is_undone,
    masks_overflow,
    masked_rows,
    recurrent_layers,
    reduced_sums,
)
