from __future__ import print_function

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(16 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(x)
        return F.log_softmax(x.float(), dim=1)


def digits(n, seed):
    g = torch.Generator().manual_seed(100)
    templates = (torch.rand(10, 1, 16, 16, generator=g) < 0.3).float()
    g.manual_seed(seed)
    target = torch.randint(0, 10, (n,), generator=g)
    return templates[target] + 0.4 * torch.randn(n, 1, 16, 16, generator=g), target


def train(args, model, scaler, data_target, optimizer, epoch):
    model.train()
    data_all, target_all = data_target
    for batch_idx, idx in enumerate(torch.randperm(len(target_all)).split(args.batch_size)):
        data, target = data_all[idx], target_all[idx]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(data)
            loss = F.nll_loss(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if batch_idx % args.log_interval == 0:
            done = batch_idx * args.batch_size
            print("Train Epoch: {} [{}/{}]\tLoss: {:.6f}".format(epoch, done, len(target_all), loss.item()))


def test(model, data_target):
    model.eval()
    data, target = data_target
    with torch.no_grad():
        output = model(data)
    correct = (output.argmax(1) == target).sum().item()
    print(
        "\nTest set: Average loss: {:.4f}, Accuracy: {}/{}\n".format(F.nll_loss(output, target), correct, len(target))
    )


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(1, args.epochs + 1):
        train(args, model, scaler, digits(640, 0), optimizer, epoch)
        test(model, digits(200, 1))
        scheduler.step()


if __name__ == "__main__":
    main()
