import contextlib

import torch


class MixedPrecision:
    """Autocast and the scaler behind one switch."""

    def __init__(self, enabled=True, max_grad_norm=5.0):
        self.enabled = enabled
        self.max_grad_norm = max_grad_norm
        self.scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.float16) if self.enabled else contextlib.nullcontext()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def unscale(self, *optimizers):
        for opt in optimizers:
            self.scaler.unscale_(opt)

    def clip_and_step(self, optimizer):
        self.scaler.unscale_(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(params, self.max_grad_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        return norm
