import torch
import torch.nn as nn
import torch.nn.functional as F

from sam import SAM


class WideBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, padding=1)

    def forward(self, x):
        return self.conv(F.relu(self.bn(x)))


class WideResNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1, self.block2 = WideBlock(8, 16), WideBlock(16, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.block2(self.block1(self.stem(x))).mean((2, 3)))


def batches(n, generator):
    for _ in range(n):
        yield torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def train(epochs=2, max_norm=2.0):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = WideResNet()
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    generator = torch.Generator().manual_seed(0)

    def loss_of(inputs, targets):
        with torch.autocast("cpu", dtype=torch.float16):
            return F.cross_entropy(model(inputs), targets, label_smoothing=0.1)

    for epoch in range(epochs):
        for inputs, targets in batches(10, generator):
            loss = loss_of(inputs, targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.first_step(zero_grad=True)

            scaler.scale(loss_of(inputs, targets)).backward()
            scaler.unscale_(optimizer)  # true gradients for the clip
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.second_step(zero_grad=True)
            scaler.update()
        print(f"epoch {epoch} loss {loss.item():.3f}")


if __name__ == "__main__":
    train()
