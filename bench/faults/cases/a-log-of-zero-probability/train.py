import torch
import torch.nn as nn

torch.set_num_threads(1)
torch.manual_seed(0)

CLASSES = ["walk", "run", "cycle", "drive"]


def sensor_windows(n, seed):
    """Raw accelerometer counts; labels typed in by the wearer."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    base = torch.randn(4, 30, generator=torch.Generator().manual_seed(99)) * 25
    x = base[y] + 8 * torch.randn(n, 30, generator=g)
    x[227] = 400 * torch.randn(30, generator=g)  # somebody dropped the sensor
    wrong = torch.rand(n, generator=g) < 0.03
    y = torch.where(wrong, (y + 1) % 4, y)
    return x, y


class Activity(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 4), nn.Softmax(dim=-1))

    def forward(self, x):
        return self.net(x)


def nll(probs, y):
    picked = probs.gather(1, y.unsqueeze(1))
    return -torch.log(picked).mean()


x, y = sensor_windows(512, 0)
model = Activity()
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
batch = 16
for step in range(len(x) // batch):
    xb, yb = x[step * batch : (step + 1) * batch], y[step * batch : (step + 1) * batch]
    probs = model(xb)
    loss = nll(probs, yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    acc = (probs.argmax(-1) == yb).float().mean()
    print(f"step {step:3d} | loss {loss.item():8.4f} | acc {acc.item():.2f}")
