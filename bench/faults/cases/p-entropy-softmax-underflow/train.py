"""Semi-supervised classifier: cross-entropy on labelled data, entropy minimisation on the rest."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def entropy(logits):
    p = logits.softmax(dim=1)
    return -(p * torch.log(p)).sum(dim=1).mean()


class Classifier(nn.Module):
    def __init__(self, width=24, classes=5):
        super().__init__()
        self.trunk = nn.Sequential()
        for i in range(2):
            self.trunk.add_module(f"fc{i}", nn.Linear(8 if i == 0 else width, width))
            self.trunk.add_module(f"act{i}", nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


class Learner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = Classifier()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.centres = 2.0 * torch.randn(5, 8)

    def sample(self, n):
        y = torch.randint(0, 5, (n,))
        return self.centres[y] + 0.6 * torch.randn(n, 8), y

    def training_step(self):
        (xl, yl), (xu, _) = self.sample(self.cfg.labelled), self.sample(self.cfg.unlabelled)
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(torch.cat([xl, xu]))
            ce = F.cross_entropy(out[: len(xl)], yl)
            ent = entropy(out[len(xl) :])
            return {"loss": ce + self.cfg.weight * ent, "ce": ce.detach(), "ent": ent.detach()}

    def fit(self):
        for step in range(self.cfg.steps):
            res = self.training_step()
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(res["loss"]).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            if step % 10 == 0:
                print(" ".join([f"step {step}"] + [f"{k} {v.item():.4f}" for k, v in res.items()]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(17)
    Learner(SimpleNamespace(lr=6e-3, labelled=8, unlabelled=16, weight=0.5, steps=90)).fit()
