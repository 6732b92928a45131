"""How often a loop waits for a CUDA device, plain and guarded, and whether both leave the same numbers behind.

Waits are counted by `torch.cuda.set_sync_debug_mode`: every call that makes the host wait for the device, with the step in
which it came. Each kind of loop is trained twice from the same seed, for 150 steps; the digest is of all parameters, the
optimizer's state, the generator's and the scaler's.

Run `python bench/device/waits.py` on a machine with a CUDA device.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

import ampguard

STEPS = 150
KINDS = {
    "scaled": "GradScaler, AdamW",
    "fused": "GradScaler, AdamW(fused=True), which never asks the device",
    "clip": "GradScaler, unscale_, clip_grad_norm_",
    "accum": "GradScaler, two backward passes a step",
    "bf16": "bfloat16, no scaler, clip_grad_norm_",
    "plain32": "float32, AdamW(fused=True)",
    "event": "GradScaler that begins at 2**17: the first steps are skipped",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v)))
        return x + self.mlp(x)


def made(kind: str) -> tuple[nn.Module, Any, Any, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=kind in ("fused", "plain32"))
    is_scaled = kind in ("scaled", "fused", "clip", "accum", "event")
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled, init_scale=2.0 ** (17 if kind == "event" else 13))
    x, y = torch.randn(32, 10, 16, device="cuda"), torch.randint(8, (320,), device="cuda")
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for factor in (1.0, 0.5) if kind == "accum" else (1.0,):
            with torch.autocast("cuda", dtype=dtype, enabled=kind != "plain32"):
                loss = nn.functional.cross_entropy(model(x * factor).flatten(0, 1), y)
            scaler.scale(loss).backward()
        if kind in ("clip", "bf16"):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return model, optimizer, scaler, step


def trained(kind: str, guarded: bool) -> tuple[str, list[int]]:
    """A digest of what is left behind, and the waits of each step."""
    model, optimizer, scaler, step = made(kind)
    waits = 0

    def count(message: object, *_: Any, **__: Any) -> None:
        nonlocal waits
        waits += "synchronizing" in str(message)

    found = []
    with contextlib.ExitStack() as stack:
        if guarded:
            out = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
            stack.enter_context(ampguard.watch(out=f"{out}/run"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = count  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        for _ in range(STEPS):
            before = waits
            step()
            found.append(waits - before)
        torch.cuda.set_sync_debug_mode("default")
    state = [value for values in optimizer.state_dict()["state"].values() for value in values.values()]
    tensors = [*model.parameters(), *filter(torch.is_tensor, state), torch.cuda.get_rng_state()]
    digest = hashlib.sha1(b"".join(t.detach().cpu().numpy().tobytes() for t in tensors))
    digest.update(repr(scaler.state_dict()).encode())
    return digest.hexdigest()[:12], found


def main() -> None:
    torch.backends.cudnn.deterministic = True
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {STEPS} steps\n")
    print("| loop | same numbers | waits, plain | waits, guarded | steps with more waits |")
    print("|---|---|---|---|---|")
    for kind, what in KINDS.items():
        (plain, without), (watched, with_guard) = trained(kind, False), trained(kind, True)
        more = [str(i) for i, (a, b) in enumerate(zip(without, with_guard, strict=True)) if a != b]
        same = "yes" if plain == watched else "NO"
        print(f"| {what} | {same} | {sum(without)} | {sum(with_guard)} | {', '.join(more) or 'none'} |", flush=True)


if __name__ == "__main__":
    main()
