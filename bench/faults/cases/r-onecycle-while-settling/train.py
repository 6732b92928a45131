"""Keyword spotting with super-convergence: one cycle of the learning rate, stepped per batch, in float16."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class KeywordNet(nn.Module):
    def __init__(self, mels=16, words=5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(mels, 32, 5, padding=2),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.MaxPool1d(2),
            nn.Conv1d(32, 32, 3),
            nn.ReLU(),
        )
        self.classify = nn.Linear(32, words)

    def forward(self, x):
        return self.classify(self.features(x).mean(-1))


class Engine:
    """Runs epochs; everything that happens after a batch is a callback in order."""

    def __init__(self, model, optimizer, criterion, scaler, on_batch_end=()):
        self.model, self.optimizer, self.criterion, self.scaler = model, optimizer, criterion, scaler
        self.on_batch_end = list(on_batch_end)
        self.iteration = 0

    def run_epoch(self, loader):
        self.model.train()
        for x, y in loader:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                self.loss = self.criterion(self.model(x), y)
            self.scaler.scale(self.loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            for callback in self.on_batch_end:
                callback(self)
            self.iteration += 1


class ScheduleLR:
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def __call__(self, engine):
        self.scheduler.step()


class PrintEvery:
    def __init__(self, n):
        self.n = n

    def __call__(self, engine):
        if engine.iteration % self.n == 0:
            lr = engine.optimizer.param_groups[0]["lr"]
            print(
                f"{engine.iteration:3d} loss {engine.loss.item():.4f} lr {lr:.4f} scale {engine.scaler.get_scale():.0f}"
            )


def main():
    torch.set_num_threads(1)
    torch.manual_seed(14)
    words = torch.randint(0, 5, (320,))
    spectra = torch.randn(320, 16, 20)
    spectra[torch.arange(320), words * 3] += 2.0
    loader = DataLoader(TensorDataset(spectra, words), batch_size=16, shuffle=True)
    epochs = 2
    model = KeywordNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=epochs, steps_per_epoch=len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    engine = Engine(model, optimizer, nn.CrossEntropyLoss(), scaler, [ScheduleLR(cycle), PrintEvery(5)])
    for _ in range(epochs):
        engine.run_epoch(loader)


if __name__ == "__main__":
    main()
