import torch


class MixedPrecision:
    """Keeps the loss scale as high as it goes: doubled often, halved when a step overflows."""

    def __init__(self, init_scale=2.0**14, growth_interval=6):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)
        self.history = []

    def context(self):
        return torch.autocast("cpu", dtype=torch.float16)

    def step(self, loss, optimizer, scheduler):
        before = self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        after = self.scaler.get_scale()
        self.history.append(after)
        if after >= before:
            scheduler.step()
        return after
