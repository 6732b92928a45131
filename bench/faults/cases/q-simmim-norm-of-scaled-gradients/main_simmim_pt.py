import argparse
import datetime
import logging
import time

import torch

from simmim import Encoder, SimMIM
from utils import AverageMeter

logger = logging.getLogger("simmim")


def parse_option():
    parser = argparse.ArgumentParser("SimMIM pre-training")
    parser.add_argument("--base-lr", type=float, default=8e-4)
    parser.add_argument("--clip-grad", type=float, default=0.0)
    parser.add_argument("--enable-amp", action="store_true")
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--print-freq", type=int, default=5)
    return parser.parse_args()


def build_loader(args):
    g = torch.Generator().manual_seed(0)
    ramp = torch.linspace(-1, 1, 16)
    for _ in range(args.iters):
        a, b = torch.randn(2, 8, 3, 1, 1, generator=g)
        img = a * ramp[:, None] + b * ramp[None, :]
        yield img, (torch.rand(8, 4, 4, generator=g) < 0.6).float()


def get_grad_norm(parameters, norm_type=2):
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(filter(lambda p: p.grad is not None, parameters))
    norm_type = float(norm_type)
    total_norm = 0
    for p in parameters:
        param_norm = p.grad.data.norm(norm_type)
        total_norm += param_norm.item() ** norm_type
    total_norm = total_norm ** (1.0 / norm_type)
    return total_norm


def train_one_epoch(config, model, data_loader, optimizer, epoch, scaler):
    model.train()
    optimizer.zero_grad()
    batch_time, loss_meter = AverageMeter(), AverageMeter()
    norm_meter, loss_scale_meter = AverageMeter(), AverageMeter()
    start = end = time.time()
    for idx, (img, mask) in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.float16, enabled=config.enable_amp):
            loss = model(img, mask)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if config.clip_grad:
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        else:
            grad_norm = get_grad_norm(model.parameters())
        scaler.step(optimizer)
        scaler.update()

        loss_meter.update(loss.item(), img.size(0))
        norm_meter.update(float(grad_norm))
        loss_scale_meter.update(scaler.get_scale())
        batch_time.update(time.time() - end)
        end = time.time()
        if idx % config.print_freq == 0:
            logger.info(
                f"Train: [{epoch}][{idx}/{config.iters}]\t"
                f"loss {loss_meter.val:.4f} ({loss_meter.avg:.4f})\t"
                f"grad_norm {norm_meter.val:.4f} ({norm_meter.avg:.4f})\t"
                f"loss_scale {loss_scale_meter.val:.4f}"
            )
    logger.info(f"EPOCH {epoch} training takes {datetime.timedelta(seconds=int(time.time() - start))}")


def main(config):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = SimMIM(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.base_lr, betas=(0.9, 0.999), weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu")
    train_one_epoch(config, model, build_loader(config), optimizer, 0, scaler)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(parse_option())
