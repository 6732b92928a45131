import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TemporalBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, 5, stride=stride, padding=2)
        self.bn = nn.BatchNorm1d(cout)
        self.down = nn.Conv1d(cin, cout, 1, stride=stride)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)) + self.down(x))


class SkeletonNet(nn.Module):
    """Joints over time -> action."""

    def __init__(self, joints=17, actions=8):
        super().__init__()
        self.blocks = nn.Sequential(TemporalBlock(joints * 3, 32), TemporalBlock(32, 48, 2), TemporalBlock(48, 48, 2))
        self.fc = nn.Linear(48, actions)

    def forward(self, x):
        return self.fc(self.blocks(x).mean(-1))


def get_parser():
    parser = argparse.ArgumentParser(description="Action recognition")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--amp-init-scale", type=float, default=2.0**24)
    parser.add_argument("--base-lr", type=float, default=0.05)
    parser.add_argument("--num-epoch", type=int, default=3)
    return parser


class Processor:
    def __init__(self, arg):
        self.arg = arg
        g = torch.Generator().manual_seed(7)
        y = torch.randint(0, 8, (192,), generator=g)
        x = torch.randn(192, 51, 24, generator=g) + torch.randn(8, 51, 1, generator=g)[y]
        self.loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=g)
        self.model = SkeletonNet()
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=arg.base_lr, momentum=0.9, nesterov=True)
        self.amp = torch.amp.GradScaler("cpu", init_scale=arg.amp_init_scale, enabled=arg.half)

    def train(self, epoch):
        losses = []
        for data, label in self.loader:
            with torch.autocast("cpu", dtype=torch.float16, enabled=self.arg.half):
                output = self.model(data)
                loss = self.loss(output, label)
            self.optimizer.zero_grad()
            self.amp.scale(loss).backward()
            self.amp.step(self.optimizer)
            self.amp.update()
            losses.append(loss.item())
        print(f"Training epoch: {epoch + 1}  mean loss {sum(losses) / len(losses):.4f}  scale {self.amp.get_scale():g}")

    def start(self):
        for epoch in range(self.arg.num_epoch):
            self.train(epoch)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    Processor(get_parser().parse_args()).start()
