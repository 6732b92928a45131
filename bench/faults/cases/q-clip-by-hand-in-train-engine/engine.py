import math

import torch


class ClipGradScale:
    """Keeps the global norm of the gradients at or below `limit`."""

    def __init__(self, parameters, limit):
        self.parameters, self.limit = [p for p in parameters if p.requires_grad], limit

    def norm(self):
        return math.sqrt(
            sum(p.grad.detach().float().pow(2).sum().item() for p in self.parameters if p.grad is not None)
        )

    def __call__(self):
        total = self.norm()
        if total > self.limit:
            ratio = self.limit / total
            for p in self.parameters:
                if p.grad is not None:
                    p.grad.mul_(ratio)
        return total


class Engine:
    def __init__(self, model, optimizer, scaler, clip_grad_scale):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.clip = ClipGradScale(model.parameters(), clip_grad_scale) if clip_grad_scale else None

    def step(self, loss):
        self.scaler.scale(loss).backward()
        if self.clip is not None:
            self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def noise_like(latents, generator):
    return torch.randn(latents.shape, generator=generator)
