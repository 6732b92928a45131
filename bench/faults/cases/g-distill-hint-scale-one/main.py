import argparse

import torch
from torch import nn

from engine import NativeScaler, train_one_epoch


class Teacher(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


class Student(nn.Module):
    """A thin trunk; the regressor lifts its tokens to the teacher's width and is trained by the hint alone."""

    def __init__(self, width=32, teacher_width=96, classes=5):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(24, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.regressor = nn.Sequential(
            nn.Linear(width, teacher_width), nn.GELU(), nn.Linear(teacher_width, teacher_width)
        )
        self.classifier = nn.Linear(width, classes)

    def forward(self, x):
        h = self.trunk(x)
        return {"logits": self.classifier(h.mean(1)), "hint": self.regressor(h.detach())}


def get_args():
    parser = argparse.ArgumentParser("feature distillation")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--lr", default=2e-3, type=float)
    parser.add_argument("--hint-weight", default=1e-3, type=float)
    parser.add_argument("--loss-scale", default=1.0, type=float, help="initial loss scale")
    parser.add_argument("--clip-grad", default=5.0, type=float)
    parser.add_argument("--print-freq", default=4, type=int)
    return parser.parse_args()


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    teacher, student = Teacher().requires_grad_(False), Student()
    y = torch.randint(0, 5, (16 * 20,))
    x = torch.randn(len(y), 48, 24) + torch.randn(5, 1, 24)[y]
    loader = list(zip(x.split(16), y.split(16)))
    optimizer = torch.optim.SGD(student.parameters(), lr=args.lr * 50, momentum=0.9)
    loss_scaler = NativeScaler(args.loss_scale)
    for epoch in range(args.epochs):
        train_one_epoch(student, teacher, loader, optimizer, loss_scaler, epoch, args)


if __name__ == "__main__":
    main(get_args())
