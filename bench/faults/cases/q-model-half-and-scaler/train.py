import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

config = {"classes": 2, "folds": 2, "epochs": 3, "batch_size": 16, "lr": 1e-3}


class Screws(Dataset):
    """Good screws are round, bad ones have a notch."""

    def __init__(self, fold, size=96):
        g = torch.Generator().manual_seed(fold)
        y, x = torch.meshgrid(torch.linspace(-1, 1, 20), torch.linspace(-1, 1, 20), indexing="ij")
        disk = ((x**2 + y**2) < 0.6).float()
        self.labels = torch.randint(0, 2, (size,), generator=g)
        notch = ((x > 0.3) & (y.abs() < 0.2)).float()
        images = disk - self.labels[:, None, None] * notch * disk
        self.images = (images + 0.2 * torch.randn(size, 20, 20, generator=g))[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].half(), self.labels[i]


class Model(nn.Module):
    def __init__(self, n_class, folds):
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(1, 8, 5, 2),
                nn.ReLU(),
                nn.Conv2d(8, 16, 3, 2),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(16 * 9, n_class),
            )
            for _ in range(folds)
        )
        self.cur_net = self.nets[0]

    def set_net(self, index):
        self.cur_net = self.nets[index]

    def forward(self, x):
        return self.cur_net(x)


def fit(model, loader, epochs, lr):
    optimizer = torch.optim.SGD(model.cur_net.parameters(), lr=lr, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = criterion(model(images), labels)
            scaler.scale(loss).backward()
            try:
                scaler.step(optimizer)
            except ValueError as error:
                print(f"epoch {epoch}: {error}")
                raise SystemExit(1)
            scaler.update()
        print(f"epoch {epoch}: loss {loss.item():.4f}")


def train():
    torch.manual_seed(0)
    model = Model(config["classes"], config["folds"])
    model.half()
    for fold in range(config["folds"]):
        model.set_net(fold)
        loader = DataLoader(Screws(fold), config["batch_size"], shuffle=True)
        fit(model, loader, config["epochs"], config["lr"])


if __name__ == "__main__":
    train()
