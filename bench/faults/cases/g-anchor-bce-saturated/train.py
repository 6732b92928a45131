import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(9)


class ConvBNAct(nn.Module):
    def __init__(self, c1, c2, k=3, s=1):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class ObjectnessNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBNAct(1, 16, s=2)
        self.body = nn.Sequential(ConvBNAct(16, 32, s=2), ConvBNAct(32, 32))
        self.obj = nn.Conv2d(32, 1, 1)

    def forward(self, x):
        return self.obj(self.body(self.stem(x))).sigmoid()


def scene(g, batch=8):
    """Bright squares are objects; the annotation marks their cell."""
    images = 0.05 * torch.randn(batch, 1, 32, 32, generator=g)
    target = torch.zeros(batch, 1, 8, 8)
    for i in range(batch):
        for _ in range(3):
            r, c = torch.randint(0, 8, (2,), generator=g).tolist()
            images[i, 0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += 2.0
            target[i, 0, r, c] = 1
    return images, target


g = torch.Generator().manual_seed(4)
train_set = [scene(g) for _ in range(60)]
# an annotator forgot the squares of one image
train_set[47][1][3] = 0

net = ObjectnessNet()
opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

for step, (images, target) in enumerate(train_set):
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        prob = net(images)
        loss = F.binary_cross_entropy(prob, target)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 6 == 5 or not torch.isfinite(loss):
        print(f"step {step:3d}  loss {loss.item():.4f}  loss scale {scaler.get_scale():g}")
print("mean objectness on the last batch", f"{prob.float().mean().item():.3f}")
