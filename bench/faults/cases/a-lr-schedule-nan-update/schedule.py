import numpy as np


class StagedWarmupCosine:
    """One warm-up and one cosine per stage: [(steps, warmup_steps, base_lr), ...]."""

    def __init__(self, optimizer, stages):
        self.optimizer = optimizer
        self.bounds = np.cumsum([0] + [s[0] for s in stages])
        self.stages = stages

    def lr_at(self, step):
        k = min(int(np.searchsorted(self.bounds, step, side="right")) - 1, len(self.stages) - 1)
        length, warmup, base = self.stages[k]
        t = np.float64(step - self.bounds[k])
        with np.errstate(invalid="ignore", divide="ignore"):
            ramp = np.minimum(t / np.float64(warmup), 1.0)
        return float(base * ramp * 0.5 * (1 + np.cos(np.pi * t / length)))

    def apply(self, step):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_at(step)
