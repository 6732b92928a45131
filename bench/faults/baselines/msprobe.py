"""msprobe's overflow check (package mindstudio-probe): a dump of one step, then its analysis.

As its manual has it, a person dumps the step that went wrong, so the script runs twice: once to see in which step the
loss or an evaluation output is not finite, once with statistics (level "mix", modules and functions) of that step only.
The check answers with the first node whose inputs are finite and whose output is not: a Python function, a stack, and
the modules around it.

msprobe imports tensorboard for a monitor that the check does not use; an empty stand-in keeps that package optional.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from bench.faults.baselines import host
from bench.faults.scoring import Claim
from torch import nn

STACK = re.compile(r"File (.+?), line (\d+), in ")
MODULE = re.compile(r"(?:Module|Cell)\.(.+)\.\w+\.forward\.\d+(?:\.\d+)*$")


def first_bad_step(command: list[str]) -> None:
    """First run: print the step at which a loss that is differentiated, or an eval output, is first not finite."""
    clock = host.Clock()
    clock.install()
    backward = torch.autograd.backward

    def say(values: Any, mode: str) -> None:
        if mode == "eval" and any(not torch.isfinite(value).all() for value in tensors_in(values)):
            report(clock.step, mode)

    def differentiated(roots: Any, *args: Any, **kwargs: Any) -> Any:
        for root in [roots] if isinstance(roots, torch.Tensor) else roots:
            if not torch.isfinite(root).all():
                report(clock.step, "train")
        return backward(roots, *args, **kwargs)

    def report(step: int, mode: str) -> None:
        Path(os.environ["MSPROBE_BAD_STEP"]).write_text(json.dumps([step, mode]), encoding="utf-8")
        os._exit(0)

    def leave(module: nn.Module, output: Any) -> None:
        say(output, "train" if module.training else "eval")

    torch.autograd.backward = differentiated
    host.watch_roots(lambda module: None, leave)
    host.run_script(command)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a module's output: a tensor, or a tuple, list, dict or dataclass of them."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    elif hasattr(value, "__dict__") and not isinstance(value, (list, tuple)):
        value = list(vars(value).values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def dump_step(command: list[str], step: int, mode: str, folder: Path) -> None:
    """Second run: dump the statistics of that step."""
    without_tensorboard()
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(dump_path=str(folder), task="statistics", level="mix")
    clock, roots, dumping = host.Clock(), list[nn.Module](), False

    def enter(module: nn.Module) -> None:
        nonlocal dumping
        if not any(module is root for root in roots):
            roots.append(module)
        wanted = clock.step == step and module.training == (mode == "train")
        if wanted and not dumping:
            dumping = True
            debugger.start(model=roots[0] if len(roots) == 1 else list(roots))

    def stop() -> None:
        nonlocal dumping
        if dumping and clock.step > step:
            finish()

    def finish() -> None:
        debugger.stop()
        debugger.step()
        os._exit(0)  # the dump is complete; what follows is another step

    clock.install()
    clock.on_step.append(stop)
    host.watch_roots(enter)
    try:
        host.run_script(command)
    finally:
        if dumping:
            finish()


def without_tensorboard() -> None:
    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = type("SummaryWriter", (), {})  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = stand_in


def analyse(folder: Path, answer: Path) -> dict[str, Any] | None:
    """msprobe's own analysis of the dumped step."""
    without_tensorboard()
    from msprobe.overflow_check.analyzer import OverFlowCheck

    OverFlowCheck(str(folder), str(answer)).analyze()
    for path in answer.glob("*.json"):
        nodes = json.loads(path.read_text(encoding="utf-8")).get("rank_0") or [None]
        return nodes[0]  # type: ignore[no-any-return]
    return None


def claim_of(node: dict[str, Any], step: int, mode: str) -> Claim:
    """An anomaly node in the words of a claim."""
    name = node["op_name"]
    frames = [STACK.search(entry) for entry in node["stack_info"]] if isinstance(node["stack_info"], list) else []
    places = [(match[1], int(match[2])) for match in frames if match and not host.is_pytorch(match[1])]
    enclosing = [match[1] for entry in node["construct_info"] if (match := MODULE.match(str(entry)))]
    inner = re.sub(r"^\d+\.", "", enclosing[-1]) if enclosing else None
    return Claim(
        found=True,
        step=step,
        mode="train" if mode == "train" else "eval",
        modules=module_names(inner),
        ops=(name.split(".")[1] if not name.startswith("Module.") else name.split(".")[-4],),
        file=places[0][0] if places else None,
        code=host.code_at(*places[0]) if places else None,
        note=f"{name} in {inner!r}",
    )


def module_names(name: str | None) -> tuple[str | None, ...]:
    """msprobe names the root `model`, or no module at all for what runs directly in the root's forward."""
    if name in (None, "model", "module"):
        return (name, "")
    return (name, name.removeprefix("model."))


def main() -> None:
    claim_path, command = Path(sys.argv[1]), sys.argv[2:]
    match os.environ.get("MSPROBE_PASS"):
        case "1":
            first_bad_step(command)
        case "2":
            step, mode = json.loads(os.environ["MSPROBE_STEP"])
            dump_step(command, step, mode, Path(os.environ["MSPROBE_DUMP"]))
        case _:
            host.write_claim(claim_path, both_runs())


def both_runs() -> Claim:
    """Run the script twice in processes of their own, then ask msprobe."""
    again = [sys.executable, "-m", "bench.faults.baselines.msprobe", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as room:
        noted, dump = Path(room, "bad_step"), Path(room, "dump")
        subprocess.run(again, env=os.environ | {"MSPROBE_PASS": "1", "MSPROBE_BAD_STEP": str(noted)}, check=False)
        if not noted.is_file():
            return Claim(found=False)
        found = noted.read_text(encoding="utf-8")
        env = os.environ | {"MSPROBE_PASS": "2", "MSPROBE_STEP": found, "MSPROBE_DUMP": str(dump)}
        subprocess.run(again, env=env, check=False)
        steps = sorted(dump.glob("step*"))
        node = analyse(steps[0], Path(room, "answer")) if steps else None
        return claim_of(node, *json.loads(found)) if node else Claim(found=False, note="no anomaly node")


if __name__ == "__main__":
    main()
