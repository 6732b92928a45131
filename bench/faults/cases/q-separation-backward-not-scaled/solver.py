import math

import torch
import torch.nn.functional as F


class Solver:
    def __init__(self, model, optimizer, config):
        self.model, self.optimizer, self.config = model, optimizer, config
        self.scaler = torch.amp.GradScaler("cpu", enabled=config["fp16"])

    def loader(self, epoch):
        g = torch.Generator().manual_seed(epoch)
        n, length = self.config["batch_size"], self.config["segment"]
        t = torch.arange(length) / 64
        for _ in range(self.config["batches_per_epoch"]):
            pitch = torch.rand(n, 2, 1, generator=g) * 6 + 1
            phase = torch.rand(n, 2, 1, generator=g) * math.tau
            stems = torch.sin(pitch * t + phase)
            stems[:, 1] = stems[:, 1].sign() * 0.5
            yield stems.sum(1), stems

    def train(self):
        for epoch in range(self.config["epochs"]):
            loss = self._run_one_epoch(epoch)
            print(f"Train | Epoch {epoch + 1} | Loss {loss:.5f}")

    def _optimize(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not grads:
            return False
        if self.config["fp16"]:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["max_grad_norm"])
            self.optimizer.step()
        return True

    def _run_one_epoch(self, epoch):
        self.model.train()
        total = 0.0
        for idx, (mixture, stems) in enumerate(self.loader(epoch)):
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.config["fp16"]):
                estimate = self.model(mixture)
                loss = F.l1_loss(estimate, stems)
            self._optimize(loss)
            total += loss.item()
        return total / (idx + 1)
