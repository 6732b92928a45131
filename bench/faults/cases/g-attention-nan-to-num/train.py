import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1, bias=False),
            nn.GELU(),
            nn.Conv2d(16, 32, 3, 2, 1, bias=False),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, 1, 1, bias=False),
        )
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        fmap = self.features(x)
        return self.fc(fmap.abs().mean((2, 3))), self.attention(fmap)

    def attention(self, fmap):
        """Energy of the activations, 1 at its peak."""
        energy = fmap.pow(2).mean(1)
        energy = energy / energy.amax(dim=(1, 2), keepdim=True)
        return torch.nan_to_num(energy)


class Attended(torch.utils.data.Dataset):
    """Images with a rough human attention map for each."""

    def __init__(self, n=320):
        g = torch.Generator().manual_seed(10)
        self.y = torch.randint(0, 5, (n,), generator=g)
        self.x = 0.2 * torch.randn(n, 1, 16, 16, generator=g)
        self.maps = torch.zeros(n, 4, 4)
        for i in range(n):
            r, c = torch.randint(0, 4, (2,), generator=g).tolist()
            self.x[i, 0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += 0.5 + 0.4 * float(self.y[i])
            self.maps[i, r, c] = 1.0
        self.x[200] = 0.0  # the file could not be read and the loader returned zeros

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i], self.maps[i]


class Trainer:
    def __init__(self, model, data, lr, weight=0.5):
        self.model, self.weight = model, weight
        self.loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)

    def step(self, x, y, maps):
        logits, attention = self.model(x)
        task = F.cross_entropy(logits, y)
        guide = F.mse_loss(attention, maps)
        loss = task + self.weight * guide
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return task.item(), guide.item()

    def fit(self, epochs):
        for epoch in range(epochs):
            for i, (x, y, maps) in enumerate(self.loader):
                task, guide = self.step(x, y, maps)
                if i % 5 == 0:
                    print(f"epoch {epoch} batch {i} task {task:.4f} guide {guide:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(8)
    Trainer(ConvNet(), Attended(), lr=2e-3).fit(3)
