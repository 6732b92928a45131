import torch


class NativeScalerWithGradNormCount:
    state_dict_key = "amp_scaler"

    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad if clip_grad is not None else float("inf"))
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict):
        self._scaler.load_state_dict(state_dict)


class CosineWithWarmup:
    def __init__(self, optimizer, base_lr, warmup, total):
        self.optimizer, self.base_lr, self.warmup, self.total = optimizer, base_lr, warmup, total

    def step_update(self, num_updates):
        if num_updates < self.warmup:
            lr = self.base_lr * (num_updates + 1) / self.warmup
        else:
            done = (num_updates - self.warmup) / max(self.total - self.warmup, 1)
            lr = 0.5 * self.base_lr * (1 + torch.cos(torch.tensor(torch.pi * min(done, 1.0))).item())
        for group in self.optimizer.param_groups:
            group["lr"] = lr
