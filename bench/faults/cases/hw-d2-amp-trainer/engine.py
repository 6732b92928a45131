"""A trainer with hooks, in the manner of detectron2; nothing in it knows what it trains."""

import torch


class HookBase:
    trainer = None

    def before_step(self): ...

    def after_backward(self): ...

    def after_step(self): ...


class SimpleTrainer:
    def __init__(self, model, data_loader, optimizer):
        model.train()
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer
        self.iter, self.storage, self._hooks = 0, {}, []

    def register_hooks(self, hooks):
        for hook in hooks:
            hook.trainer = self
        self._hooks += hooks

    def train(self, start_iter, max_iter):
        self._data_loader_iter = iter(self.data_loader)
        for self.iter in range(start_iter, max_iter):
            for hook in self._hooks:
                hook.before_step()
            self.run_step()
            for hook in self._hooks:
                hook.after_step()

    def after_backward(self):
        for hook in self._hooks:
            hook.after_backward()

    def _write_metrics(self, loss_dict):
        metrics = {k: v.detach().item() for k, v in loss_dict.items()}
        total = sum(metrics.values())
        if not torch.isfinite(torch.tensor(total)):
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        self.storage = {"total_loss": total, **metrics}


class AMPTrainer(SimpleTrainer):
    """Autocast around the model and the sum of its losses, one scaler; gradients are cleared before backward."""

    def __init__(self, model, data_loader, optimizer, precision=torch.float16):
        super().__init__(model, data_loader, optimizer)
        self.grad_scaler, self.precision = torch.amp.GradScaler("cpu", init_scale=1024.0), precision

    def run_step(self):
        data = next(self._data_loader_iter)
        with torch.autocast("cpu", dtype=self.precision):
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self.after_backward()
        self._write_metrics(loss_dict)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
