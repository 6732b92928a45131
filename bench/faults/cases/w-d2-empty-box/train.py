"""A region proposal head in small, trained by an AMPTrainer; annotations as they come from a labelling tool."""

import torch
from engine import AMPTrainer, HookBase
from torch import nn
from torch.nn import functional as F


class Box2BoxTransform:
    def __init__(self, weights=(10.0, 10.0, 5.0, 5.0)):
        self.weights = weights

    def get_deltas(self, src, target):
        src_w, src_h = src[..., 2] - src[..., 0], src[..., 3] - src[..., 1]
        target_w, target_h = target[..., 2] - target[..., 0], target[..., 3] - target[..., 1]
        wx, wy, ww, wh = self.weights
        dx = wx * (target[..., 0] + target[..., 2] - src[..., 0] - src[..., 2]) / 2 / src_w
        dy = wy * (target[..., 1] + target[..., 3] - src[..., 1] - src[..., 3]) / 2 / src_h
        dw = ww * torch.log(target_w / src_w)
        dh = wh * torch.log(target_h / src_h)
        return torch.stack((dx, dy, dw, dh), dim=-1)


class ProposalHead(nn.Module):
    """One anchor in the middle of each cell; the cell that holds the object's centre is its positive."""

    def __init__(self, cells=4, stride=4):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.objectness_logits = nn.Conv2d(16, 1, 1)
        self.anchor_deltas = nn.Conv2d(16, 4, 1)
        self.transform = Box2BoxTransform()
        centre = (torch.arange(cells) + 0.5) * stride
        y, x = torch.meshgrid(centre, centre, indexing="ij")
        self.register_buffer("anchors", torch.stack((x - 3, y - 3, x + 3, y + 3), -1).reshape(-1, 4))
        self.cells, self.stride = cells, stride

    def forward(self, features, boxes):
        t = F.relu(self.conv(features))
        logits = self.objectness_logits(t).flatten(1)
        deltas = self.anchor_deltas(t).flatten(2).transpose(1, 2)
        return self.losses(logits, deltas, boxes)

    def losses(self, logits, deltas, boxes):
        centre = ((boxes[:, :2] + boxes[:, 2:]) / 2 / self.stride).long().clamp(0, self.cells - 1)
        positive = centre[:, 1] * self.cells + centre[:, 0]
        rows = torch.arange(len(boxes))
        target = self.transform.get_deltas(self.anchors[positive], boxes)
        labels = torch.zeros(logits.shape).index_put((rows, positive), torch.ones(len(boxes)))
        return {
            "loss_rpn_cls": F.binary_cross_entropy_with_logits(logits.float(), labels),
            "loss_rpn_loc": F.smooth_l1_loss(deltas[rows, positive].float(), target),
        }


class ProposalNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.proposal_generator = ProposalHead()

    def forward(self, data):
        return self.proposal_generator(self.backbone(data["image"]), data["boxes"])


def annotated(batch=8, clicks=(293,)):
    """A rectangle per picture. Someone clicked without dragging: a box as wide as nothing."""
    g = torch.Generator().manual_seed(2)
    seen = 0
    while True:
        corner = torch.randint(0, 8, (batch, 2), generator=g)
        size = torch.randint(3, 8, (batch, 2), generator=g)
        image = 0.3 * torch.randn(batch, 1, 16, 16, generator=g)
        for i in range(batch):
            (x, y), (w, h) = corner[i].tolist(), size[i].tolist()
            image[i, 0, y : y + h, x : x + w] += 1.5
            if seen in clicks:
                size[i, 0] = 0
            seen += 1
        yield {"image": image, "boxes": torch.cat([corner, corner + size], 1).float()}


class PeriodicWriter(HookBase):
    def after_step(self):
        if self.trainer.iter % 10 == 0:
            print(f"iter: {self.trainer.iter}  " + "  ".join(f"{k}: {v:.4g}" for k, v in self.trainer.storage.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ProposalNetwork()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    trainer = AMPTrainer(model, annotated(), optimizer)
    trainer.register_hooks([PeriodicWriter()])
    trainer.train(0, 60)
