import argparse
import logging

import torch
import torch.nn.functional as F

from detector import Detector

log = logging.getLogger("det")


def scenes(n, seed, batch=8):
    g = torch.Generator().manual_seed(seed)
    for _ in range(n):
        img = torch.randint(0, 40, (batch, 1, 32, 32), generator=g).float()
        boxes = torch.zeros(batch, 4)
        for i in range(batch):
            x, y, w, h = torch.randint(4, 14, (4,), generator=g).tolist()
            img[i, 0, y : y + h, x : x + w] += 180
            boxes[i] = torch.tensor([x + w / 2, y + h / 2, w, h]) / 32
        yield img, boxes


def train(model, opt, steps):
    model.train()
    for step, (img, boxes) in enumerate(scenes(steps, 0)):
        deltas, scores = model(img / 255)
        cell = (boxes[:, 1] * 4).long() * 4 + (boxes[:, 0] * 4).long()
        rows = torch.arange(len(img))
        target = model.head.coder.encode(boxes[:, None])[rows, cell]
        loss = F.smooth_l1_loss(deltas[rows, cell], target) + F.cross_entropy(scores, cell)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            log.info("step %d loss %.4f", step, loss.item())


@torch.no_grad()
def evaluate(model):
    model.eval()
    sizes = []
    for img, boxes in scenes(3, 1):
        out, scores = model(img)
        wh = out[..., 2:] - out[..., :2]
        expected = (scores.unsqueeze(-1) * wh).sum(1) / scores.sum(1, keepdim=True)
        sizes.append((expected - boxes[:, 2:]).abs().mean())
    return torch.stack(sizes).mean().item()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(2)
    det = Detector()
    train(det, torch.optim.Adam(det.parameters(), lr=3e-3), args.steps)
    log.info("mean size error %.4f", evaluate(det))
