from __future__ import print_function, division

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim


class RAFTish(nn.Module):
    """Features, an all-pairs correlation, and a few updates of the flow (all predictions are returned)."""

    def __init__(self, dim=16, iters=4):
        super().__init__()
        self.fnet = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1))
        self.cnet = nn.Conv2d(1, dim, 3, padding=1)
        self.update_block = nn.ModuleDict(
            {
                "corr": nn.Conv2d(64, dim, 1),
                "gru": nn.Conv2d(2 * dim + 2, dim, 3, padding=1),
                "flow": nn.Conv2d(dim, 2, 1),
            }
        )
        self.iters = iters

    def forward(self, image1, image2):
        f1, f2 = self.fnet(image1), self.fnet(image2)
        corr = torch.einsum("bchw,bcn->bnhw", f1, f2.flatten(2)) / f1.shape[1] ** 0.5
        corr = torch.relu(self.update_block["corr"](corr))
        net = torch.tanh(self.cnet(image1))
        flow = torch.zeros_like(image1).repeat(1, 2, 1, 1)
        predictions = []
        for _ in range(self.iters):
            flow = flow.detach()
            net = torch.tanh(self.update_block["gru"](torch.cat([net, corr, flow.to(net.dtype)], 1)))
            flow = flow + self.update_block["flow"](net)
            predictions.append(flow)
        return predictions


def sequence_loss(flow_preds, flow_gt, valid, gamma=0.8):
    flow_loss = 0.0
    for i, prediction in enumerate(flow_preds):
        weight = gamma ** (len(flow_preds) - i - 1)
        flow_loss += weight * (valid[:, None] * (prediction.float() - flow_gt).abs()).sum(1).mean((1, 2)).sum()
    epe = (flow_preds[-1].float() - flow_gt).square().sum(1).sqrt().mean()
    return flow_loss, {"epe": epe.item()}


def fetch_optimizer(args, model):
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=args.epsilon)
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.num_steps + 10, pct_start=0.15, cycle_momentum=False, anneal_strategy="linear"
    )
    return optimizer, scheduler


def fetch_batches(args):
    g = torch.Generator().manual_seed(1234)
    while True:
        image = F.interpolate(torch.rand(args.batch_size, 1, 4, 4, generator=g), size=8, mode="bilinear")
        shift = torch.randint(-2, 3, (args.batch_size, 2), generator=g)
        moved = torch.stack([im.roll(tuple(s.tolist()), (1, 2)) for im, s in zip(image, shift)])
        flow = shift.flip(1).float()[:, :, None, None].expand(-1, -1, 8, 8)
        valid = (torch.rand(args.batch_size, 8, 8, generator=g) < 0.9).float()
        yield image * 2 - 1, moved * 2 - 1, flow, valid


def train(args):
    model = RAFTish()
    optimizer, scheduler = fetch_optimizer(args, model)
    total_steps = 0
    scaler = torch.amp.GradScaler("cpu", enabled=args.mixed_precision)
    for image1, image2, flow, valid in fetch_batches(args):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=args.mixed_precision):
            flow_predictions = model(image1, image2)
        loss, metrics = sequence_loss(flow_predictions, flow, valid, args.gamma)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)

        scaler.step(optimizer)
        scheduler.step()
        scaler.update()

        if total_steps % 5 == 0:
            print(
                "[{:6d}, {:10.7f}] loss {:.3f} epe {:.4f}".format(
                    total_steps, scheduler.get_last_lr()[0], loss, metrics["epe"]
                )
            )
        total_steps += 1
        if total_steps == args.num_steps:
            return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--num_steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=6)
    parser.add_argument("--mixed_precision", action="store_true")
    parser.add_argument("--wdecay", type=float, default=5e-5)
    parser.add_argument("--epsilon", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.8)
    args = parser.parse_args()
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    train(args)
