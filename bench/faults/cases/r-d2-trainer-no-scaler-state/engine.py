"""A trainer with hooks, in the manner of detection frameworks: the loop knows nothing of what the hooks do."""

import time

import torch


class HookBase:
    trainer = None

    def before_train(self): ...

    def after_step(self): ...

    def after_train(self): ...


class TrainerBase:
    def __init__(self):
        self.hooks, self.iter, self.start_iter, self.max_iter, self.storage = [], 0, 0, 0, {}

    def register_hooks(self, hooks):
        for hook in hooks:
            hook.trainer = self
            self.hooks.append(hook)

    def train(self, start_iter, max_iter):
        self.iter = self.start_iter = start_iter
        self.max_iter = max_iter
        for hook in self.hooks:
            hook.before_train()
        for self.iter in range(start_iter, max_iter):
            self.run_step()
            for hook in self.hooks:
                hook.after_step()
        for hook in self.hooks:
            hook.after_train()

    def run_step(self):
        raise NotImplementedError


class SimpleTrainer(TrainerBase):
    def __init__(self, model, data_loader, optimizer):
        super().__init__()
        model.train()
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer
        self._data = iter(data_loader)

    def next_batch(self):
        start = time.perf_counter()
        data = next(self._data)
        self.storage["data_time"] = time.perf_counter() - start
        return data

    def write_metrics(self, loss_dict):
        metrics = {k: v.detach().item() for k, v in loss_dict.items()}
        total = sum(metrics.values())
        if not torch.isfinite(torch.tensor(total)):
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        self.storage.update(metrics, total_loss=total)


class AMPTrainer(SimpleTrainer):
    def __init__(self, model, data_loader, optimizer, grad_scaler=None):
        super().__init__(model, data_loader, optimizer)
        self.grad_scaler = grad_scaler or torch.amp.GradScaler("cpu", init_scale=2.0**22)

    def run_step(self):
        data = self.next_batch()
        with torch.autocast("cpu", dtype=torch.float16):
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self.write_metrics(loss_dict)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
