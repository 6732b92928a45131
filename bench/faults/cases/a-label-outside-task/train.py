import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
TASKS = [[0, 1, 2], [3, 4, 5]]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.classifier = nn.Linear(48, 6)

    def forward(self, x):
        return self.classifier(self.features(x))


def masked_cross_entropy(logits, y, classes):
    """Only the classes of the current task compete."""
    off = torch.ones(logits.shape[-1], dtype=torch.bool)
    off[classes] = False
    logits = logits.float().masked_fill(off, float("-inf"))
    return F.cross_entropy(logits, y)


def stream(task, n, g, replay):
    centers = torch.randn(6, 20, generator=torch.Generator().manual_seed(0)) * 2
    for i in range(n):
        y = torch.tensor(TASKS[task])[torch.randint(0, 3, (16,), generator=g)]
        if replay and i == 6:  # first batch that comes with memories of the earlier task
            y[:4] = torch.tensor([0, 1, 2, 1])
        yield centers[y] + torch.randn(16, 20, generator=g), y


def main():
    torch.manual_seed(0)
    net = Backbone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    g = torch.Generator().manual_seed(1)
    step = 0
    for task, classes in enumerate(TASKS):
        for x, y in stream(task, 10, g, replay=task > 0):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = net(x)
                loss = masked_cross_entropy(logits, y, classes)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"task {task} step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
            step += 1


main()
