import argparse
import math

import torch

from swin import SwinTransformer
from utils import AverageMeter, NativeScalerWithGradNormCount


def parse_option():
    parser = argparse.ArgumentParser("Swin training")
    parser.add_argument("--base-lr", type=float, default=5e-4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--clip-grad", type=float, default=5.0)
    parser.add_argument("--disable_amp", action="store_true")
    return parser.parse_args()


def build_loader(args):
    g = torch.Generator().manual_seed(9)
    for _ in range(args.iters):
        targets = torch.randint(0, 10, (args.batch_size,), generator=g)
        samples = torch.randn(args.batch_size, 3, 32, 32, generator=g)
        samples += torch.linspace(-2, 2, 10)[targets][:, None, None, None]
        yield samples, targets


def train_one_epoch(args, model, criterion, loader, optimizer, loss_scaler):
    model.train()
    optimizer.zero_grad()
    loss_meter, norm_meter, scaler_meter = AverageMeter(), AverageMeter(), AverageMeter()
    for idx, (samples, targets) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = args.base_lr * min(1.0, (idx + 1) / 10)
        with torch.autocast("cpu", dtype=torch.float16, enabled=not args.disable_amp):
            outputs = model(samples)
        loss = criterion(outputs, targets)
        grad_norm = loss_scaler(loss, optimizer, clip_grad=args.clip_grad, parameters=model.parameters())
        optimizer.zero_grad()
        loss_meter.update(loss.item(), targets.size(0))
        if math.isfinite(grad_norm):
            norm_meter.update(grad_norm.item())
        scaler_meter.update(loss_scaler.state_dict()["scale"])
        if idx % 5 == 0:
            print(
                f"Train: [0/1][{idx}/{args.iters}] loss {loss_meter.val:.4f} ({loss_meter.avg:.4f}) "
                f"grad_norm {norm_meter.val:.4f} loss_scale {scaler_meter.val:.1f}"
            )


def main():
    args = parse_option()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = SwinTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.base_lr, weight_decay=0.05)
    train_one_epoch(
        args, model, torch.nn.CrossEntropyLoss(), build_loader(args), optimizer, NativeScalerWithGradNormCount()
    )


if __name__ == "__main__":
    main()
