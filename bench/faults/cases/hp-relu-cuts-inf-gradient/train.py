"""Poisson-like counts: the variance-stabilising square root sits on top of a ReLU."""

import torch
import torch.nn as nn


class CountNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        rate = torch.relu(self.fc2(torch.tanh(self.fc1(x))))
        return rate


def anscombe(rate):
    return 2.0 * rate.sqrt()


class Runner:
    def __init__(self):
        self.net = CountNet()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.w = torch.randn(10, 4)

    def batch(self):
        x = torch.randn(32, 10)
        return x, torch.poisson((x @ self.w).clamp(min=0))

    def fit(self, steps):
        for step in range(steps):
            x, counts = self.batch()
            with torch.autocast("cpu", dtype=torch.float16):
                rate = self.net(x)
                loss = (anscombe(rate) - anscombe(counts)).abs().mean()
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            if step % 10 == 0:
                dead = (rate == 0).float().mean().item()
                print(f"step {step} loss {loss.item():.4f} zero rates {dead:.2f} scale {self.scaler.get_scale():.0f}")
        return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(2)
    print(f"final loss {Runner().fit(50):.4f}")
