import logging

import torch

logger = logging.getLogger("reid")


class AMPTrainer:
    def __init__(self, model, data_loader, optimizer, param_wrapper):
        self.model, self.optimizer, self.param_wrapper = model, optimizer, param_wrapper
        self._data_loader_iter = iter(data_loader)
        self.grad_scaler = torch.amp.GradScaler("cpu")
        self.iter = 0

    def train(self, max_iter):
        self.model.train()
        for self.iter in range(max_iter):
            self.run_step()

    def run_step(self):
        data = next(self._data_loader_iter)
        with torch.autocast("cpu", dtype=torch.float16):
            loss_dict = self.model(data)
            losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(losses).backward()
        self._write_metrics(loss_dict)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.param_wrapper.assert_buffer_is_valid()

    def _write_metrics(self, loss_dict):
        metrics = {k: v.detach().item() for k, v in loss_dict.items()}
        total = sum(metrics.values())
        if total != total or total in (float("inf"), float("-inf")):
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        if self.iter % 5 == 0:
            logger.info("iter: %d  total_loss: %.4f  %s", self.iter, total, metrics)
