import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(3)


class FastGroupNorm(nn.Module):
    """Group norm with the variance as E[x^2] - E[x]^2, so that both moments come from one pass."""

    def __init__(self, groups, channels, eps=1e-5):
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        n, c, h, w = x.shape
        x = x.view(n, self.groups, -1)
        mean = x.mean(dim=-1, keepdim=True)
        var = (x * x).mean(dim=-1, keepdim=True) - mean * mean
        x = (x - mean) / torch.sqrt(var.clamp(min=0) + self.eps)
        return x.view(n, c, h, w) * self.weight[:, None, None] + self.bias[:, None, None]


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), FastGroupNorm(2, cout), nn.ReLU(inplace=True))


class SegNet(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.encoder = nn.Sequential(conv_block(1, 8), nn.MaxPool2d(2), conv_block(8, 16))
        self.decoder = nn.Sequential(conv_block(16, 8), nn.Conv2d(8, classes, 1))

    def forward(self, x):
        x = self.encoder(x)
        return F.interpolate(self.decoder(x), scale_factor=2)


def make_scans(n, offset):
    # intensity-coded scans: the third class is the bright one
    label = torch.randint(0, 3, (n, 8, 8)).repeat_interleave(2, 1).repeat_interleave(2, 2)
    img = offset + 40.0 * label.unsqueeze(1).float() + 5 * torch.randn(n, 1, 16, 16)
    return img, label


def validate(model, data, batch=8):
    # deployment runs in half precision, so validate what will be shipped
    half = copy.deepcopy(model).half().eval()
    total = 0.0
    img, label = data
    with torch.no_grad():
        for i in range(0, len(img), batch):
            out = half(img[i : i + batch].half())
            total += F.cross_entropy(out.float(), label[i : i + batch]).item() * batch
    return total / len(img)


train = make_scans(96, offset=20.0)
# scanner B has a higher base line
val = {"scanner A": make_scans(16, offset=20.0), "scanner B": make_scans(16, offset=600.0)}

model = SegNet()
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for epoch in range(3):
    model.train()
    for i in range(0, 96, 8):
        out = model(train[0][i : i + 8])
        loss = F.cross_entropy(out, train[1][i : i + 8])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch}: train loss {loss.item():.4f}")
for name, data in val.items():
    print(f"val loss on {name}: {validate(model, data):.4f}")
