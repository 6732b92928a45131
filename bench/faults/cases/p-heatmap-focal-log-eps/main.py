from argparse import ArgumentParser

import torch

from net import KeypointNet

EPS = 1e-10


def neg_loss(pred, gt):
    """Focal loss of CornerNet on the heat map."""
    pos_inds = gt.eq(1).to(pred.dtype)
    neg_inds = gt.lt(1).to(pred.dtype)
    neg_weights = torch.pow(1 - gt, 4).to(pred.dtype)
    pos_loss = torch.log(pred + EPS) * torch.pow(1 - pred, 2) * pos_inds
    neg_loss = torch.log(1 - pred + EPS) * torch.pow(pred, 2) * neg_weights * neg_inds
    num_pos = pos_inds.sum().clamp(min=1)
    return -(pos_loss.sum() + neg_loss.sum()) / num_pos


def scene(n, size=16):
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    c = torch.randint(3, size - 3, (n, 2))
    d2 = (yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2
    gt = torch.exp(-d2 / 4.0)[:, None]
    contrast = 3.0 * torch.exp(0.4 * torch.randn(n, 1, 1, 1))
    img = contrast * (d2 < 4).float()[:, None] + 0.2 * torch.randn(n, 1, size, size)
    return img, gt, torch.rand(n, 2) + 2


def train(opt):
    torch.manual_seed(opt.seed)
    model = KeypointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=256)
    for it in range(opt.iters):
        img, gt, wh = scene(opt.batch_size)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(img)
            hm_loss = neg_loss(out["hm"], gt)
            wh_loss = (out["wh"].mean(dim=(2, 3)).float() - wh).abs().mean()
            loss = hm_loss + 0.1 * wh_loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if it % 10 == 0:
            print(f"iter {it} hm_loss {hm_loss.item():.4f} wh_loss {wh_loss.item():.4f}")
        if loss != loss:
            print("hm_loss is NaN, giving up at", it)
            return 1
    return 0


if __name__ == "__main__":
    ap = ArgumentParser()
    ap.add_argument("--iters", type=int, default=80)
    ap.add_argument("--batch_size", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--seed", type=int, default=317)
    torch.set_num_threads(1)
    raise SystemExit(train(ap.parse_args()))
