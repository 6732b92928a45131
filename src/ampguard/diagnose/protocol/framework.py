"""The same fixes in the words of the framework that drives the scaler: whose loop it is, its calls have to be used.

In Lightning a `scaler.unscale_()` of one's own is a second one, which PyTorch refuses; in Fabric, Accelerate and the
transformers Trainer the scaler has no name in the script, in others it belongs to an object of theirs. Which framework it
is, the call stack has shown when the first loss was scaled.
"""

from __future__ import annotations

import re

from ampguard.capture.record import Line
from ampguard.diagnose.protocol.scene import Scene, statement

_CLIP = {
    "lightning": (
        "clip where Lightning has unscaled them already: def on_before_optimizer_step({hook}): {code}; or let it "
        "clip: Trainer(gradient_clip_val=...), in automatic optimization. Do not call unscale_ yourself: Lightning does before "
        "each step"
    ),
    "fabric": "let Fabric clip, it unscales first: fabric.clip_gradients(model, {name}, {fabric_limit})",
    "accelerate": (
        "let Accelerate clip, it unscales first: if accelerator.sync_gradients: accelerator.{function}(parameters, limit)  # "
        "once, at the end of a window"
    ),
    "trainer": (
        "let the Trainer clip, it unscales first, and once for a whole accumulation window: "
        "TrainingArguments(max_grad_norm=...)"
    ),
    "composer": (
        "let Composer clip, it unscales first: Trainer(algorithms=[GradientClipping({composer_limit})]); or in a callback of "
        "your own, where the gradients are unscaled already: def after_train_batch(self, state, logger): {code}"
    ),
    "fastai": (
        "let fastai clip, behind MixedPrecision, which unscales: Learner(..., cbs=GradientClip(...)); or in a callback of your "
        "own: order = MixedPrecision.order + 1, def before_step(self): {code}"
    ),
    "mmengine": (
        'let the wrapper clip, it unscales first: optim_wrapper=dict(type="AmpOptimWrapper", clip_grad=dict({mmengine_limit}), '
        "...); or before you clip: optim_wrapper.loss_scaler.unscale_(optim_wrapper.optimizer)"
    ),
    "speechbrain": (
        "let the Brain clip, in optimizers_step it unscales first: run_opts={{'max_grad_norm': ...}}. Do not call unscale_ "
        "yourself: the Brain does before each step"
    ),
}
_MEASURE = {
    "lightning": "measure where Lightning has unscaled them already: def on_before_optimizer_step({hook}): {code}",
    "fabric": (
        "let Fabric measure, it unscales first: norm = fabric.clip_gradients(model, {name}, max_norm=float('inf'), "
        "error_if_nonfinite=False)"
    ),
    "accelerate": (
        "let Accelerate measure, it unscales first: if accelerator.sync_gradients: norm = "
        "accelerator.clip_grad_norm_(parameters, float('inf'))"
    ),
    "trainer": (
        "the Trainer logs the true norm as grad_norm, and a callback sees true gradients in on_pre_optimizer_step, as long as "
        "max_grad_norm > 0"
    ),
    "composer": (
        "measure where Composer has unscaled them already: def after_train_batch(self, state, logger): {code}"
    ),
    "fastai": (
        "measure behind MixedPrecision, which unscales: in a callback with order = MixedPrecision.order + 1, "
        "def before_step(self): {code}"
    ),
    "mmengine": (
        'let the wrapper measure, it unscales first and logs train/grad_norm: optim_wrapper=dict(type="AmpOptimWrapper", '
        "clip_grad=dict(max_norm=float('inf')), ...)"
    ),
}
_BACKWARD = {
    "lightning": "in a LightningModule: self.manual_backward({loss})",
    "fabric": "let Fabric scale it: fabric.backward({loss})",
    "accelerate": "let Accelerate scale it: accelerator.backward({loss})",
    "trainer": "let Accelerate scale it, as the Trainer does: self.accelerator.backward({loss})",
    "mmengine": (
        "let the wrapper scale it: optim_wrapper.update_params({loss}), which steps and clears as well; or "
        "optim_wrapper.backward({loss})"
    ),
}
_STEP = {
    "lightning": "step what self.optimizers() returns, not the optimizer inside it",
    "fabric": "step what fabric.setup(model, optimizer) returns, not the optimizer inside it",
    "accelerate": "step what accelerator.prepare(optimizer) returns, not the optimizer inside it",
    "trainer": "leave the step to the Trainer, or step what self.accelerator.prepare(optimizer) returns",
    "composer": "leave the step to Composer's Trainer",
    "fastai": "leave the step to the Learner, whose MixedPrecision asks the scaler first",
    "mmengine": "step the wrapper, not the optimizer inside it: optim_wrapper.step()",
}
_GATE = {
    "lightning": (
        "let it wait: def lr_scheduler_step(self, scheduler, metric): scale = self.trainer.scaler.get_scale(); "
        "scheduler.step() if scale >= self.last_scale else None; self.last_scale = scale  # last_scale: that of the beginning; "
        "or plugins=[ampguard.integrations.lightning.GuardedPrecision(...)], whose schedulers wait"
    ),
    "fabric": (
        "step the scheduler only where the scale of the GradScaler that MixedPrecision was given did not fall: scale = "
        "scaler.get_scale(); {name}.step(); if scaler.get_scale() >= scale: scheduler.step()"
    ),
    "accelerate": (
        "hand the scheduler to accelerator.prepare(...), which then waits for skipped steps; or: if not "
        "accelerator.optimizer_step_was_skipped: scheduler.step()"
    ),
    "trainer": "if not self.accelerator.optimizer_step_was_skipped: scheduler.step()  # as the Trainer does with its own",
}
_SAVE = {
    "lightning": 'trainer.save_checkpoint(path) keeps it; in a file of your own: "scaler": trainer.scaler.state_dict()',
    "fabric": (
        'put the GradScaler that MixedPrecision was given into the state: fabric.save(path, {{"model": model, "optimizer": '
        'optimizer, "scaler": scaler}}), and into that of fabric.load'
    ),
    "accelerate": (
        "accelerator.save_state(folder) keeps it, accelerator.load_state(folder) takes it back; in a file of your own: "
        '"scaler": accelerator.scaler.state_dict()'
    ),
    "trainer": (
        "the Trainer's own checkpoints keep it (save_strategy); in a file of your own: "
        '"scaler": trainer.accelerator.scaler.state_dict()'
    ),
    "composer": (
        "Composer's own checkpoints keep it: Trainer(save_folder=...); in a file of your own: "
        '"scaler": trainer.state.scaler.state_dict()'
    ),
    "ignite": (
        'name it to ignite\'s Checkpoint: to_save = {{"model": model, "optimizer": optimizer, "scaler": {scaler}}}; and to '
        "Checkpoint.load_objects"
    ),
    "mmengine": (
        "runner.save_checkpoint(...) and CheckpointHook keep it; in a file of your own save the wrapper, not the optimizer "
        'inside it: "optimizer": runner.optim_wrapper.state_dict()'
    ),
    "monai": (
        'name it to CheckpointSaver: save_dict={{"net": network, "optimizer": optimizer, "scaler": {scaler}}}, before the first '
        "save (run() makes it); and to CheckpointLoader"
    ),
    "speechbrain": (
        "the Brain's Checkpointer keeps it: Brain(..., checkpointer=Checkpointer(folder)); in a file of your own: "
        '"scaler": brain.scaler.state_dict()'
    ),
}
_UPDATE = {
    "lightning": (
        "Lightning updates after each optimizer's step. ampguard's plugin does it once an iteration: "
        'plugins=[ampguard.integrations.lightning.GuardedPrecision("16-mixed", device)]; or put all parameters into one '
        "optimizer"
    ),
    "fabric": (
        "Fabric updates after each optimizer's step. ampguard's plugin does it once an iteration: "
        'plugins=[ampguard.integrations.lightning.GuardedPrecision("16-mixed", device)]; or put all parameters into one '
        "optimizer"
    ),
    "accelerate": (
        "Accelerate updates after each optimizer's step. ampguard's scaler does it once an iteration: "
        "ampguard.integrations.hf.prepare(accelerator), before accelerator.prepare(...); or put all parameters into one "
        "optimizer"
    ),
}
_BUILT = {
    "lightning": "make the layers before Lightning calls configure_optimizers: in __init__, setup() or configure_model()",
    "trainer": "finish the model before the Trainer builds its optimizer, that is before trainer.train()",
}


def clip_instead(scene: Scene, clips: bool) -> str | None:
    """How the framework clips (or measures) true gradients; None in a loop of the script's own."""
    code = statement(scene.again)
    by_value = "clip_grad_value" in code
    is_own = (  # not `trainer.fit(...)`, and nothing that would bring other statements along
        re.search(r"(clip|norm)\w*\(", code)
        and ";" not in code
        and not code.startswith(("for ", "if ", "with ", "def "))
    )
    if scene.framework == "lightning":  # its hook is handed the optimizer under this name
        code = re.sub(rf"(?<![\w.]){re.escape(scene.optimizer)}(?!\w)", "optimizer", code)
    words = {
        "name": scene.optimizer,
        "code": code if is_own else "...",
        "hook": _hook_arguments(scene.again),
        "function": "clip_grad_value_" if by_value else "clip_grad_norm_",
        "fabric_limit": "clip_val=..." if by_value else "max_norm=...",
        "mmengine_limit": 'type="value", clip_value=...' if by_value else "max_norm=...",
        "composer_limit": f'clipping_type="{"value" if by_value else "norm"}", clipping_threshold=...',
    }
    return _said(_CLIP if clips else _MEASURE, scene, **words)


def _hook_arguments(line: Line | None) -> str:
    """What `on_before_optimizer_step` is handed: in a callback, as the hook that has the line shows, two more."""
    known = line.code.co_varnames[: line.code.co_argcount] if line is not None else ()
    is_callback = len(known) > 2 and known[1] == "trainer"
    return ", ".join((*(known[:3] if is_callback else ("self",)), "optimizer"))


def scale_instead(scene: Scene, loss: str) -> str | None:
    """How the framework scales a loss."""
    return _said(_BACKWARD, scene, loss=loss)


def step_instead(scene: Scene) -> str | None:
    """What is to be stepped in the framework."""
    return _said(_STEP, scene)


def gate_instead(scene: Scene) -> str | None:
    """How a scheduler waits in the framework."""
    return _said(_GATE, scene, name=scene.optimizer)


def save_instead(scene: Scene) -> str | None:
    """How the framework keeps the scaler's state."""
    return _said(_SAVE, scene, scaler=scene.scaler)


def update_instead(scene: Scene) -> str | None:
    """How one update an iteration is had in the framework."""
    return _said(_UPDATE, scene)


def is_updated_by_framework(scene: Scene) -> bool:
    """Whether the script's line that updates the scaler is a step or a hook of a framework."""
    line = scene.facts.get("updated_between")
    return line is not None and ".update(" not in line.location().code


def build_instead(scene: Scene) -> str | None:
    """When the model has to be complete in the framework."""
    return _said(_BUILT, scene)


def _said(words: dict[str, str], scene: Scene, **names: str) -> str | None:
    text = words.get(scene.framework or "")
    return _with_own_name(text.format(**names), scene) if text is not None else None


def _with_own_name(text: str, scene: Scene) -> str:
    """`self.engine.clip_grad_norm_` where the script's own `self.engine.backward(loss)` shows what it calls `accelerator`."""
    called = re.search(r"([A-Za-z_][\w.]*)\.backward\(\w+[,)]", statement(scene.first))
    default = {"accelerate": "accelerator", "fabric": "fabric"}.get(scene.framework or "")
    if called is None or default is None or scene.breach.cause == "unscaled-backward":  # there it is the loss's own
        return text
    return re.sub(rf"(?<![\w.]){default}\.(?=[a-z_])", lambda _: f"{called[1]}.", text)
