import torch
import torch.nn as nn
import torch.nn.functional as F

import losses


class Baseline(nn.Module):
    def __init__(self, ids):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.heads = nn.ModuleDict({"bottleneck": nn.Linear(16, 48), "classifier": nn.Linear(48, ids)})

    def forward(self, batch):
        feat = self.backbone(batch["images"]).amax(dim=(2, 3))
        feat = self.heads["bottleneck"](feat)
        return {"features": feat, "logits": self.heads["classifier"](feat)}


class Trainer:
    def __init__(self, ids=12, per_id=2, seed=4):
        torch.manual_seed(seed)
        self.ids, self.per_id = ids, per_id
        self.prototypes = torch.randn(ids, 3, 12, 12)
        self.model = Baseline(ids)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        self.iter = 0

    def next_batch(self):
        pids = torch.randperm(self.ids)[:4].repeat_interleave(self.per_id)
        images = self.prototypes[pids] + torch.randn(len(pids), 3, 12, 12)
        # cameras with very different gains
        images = images * 36.0 * torch.exp(0.6 * torch.randn(len(pids), 1, 1, 1))
        return {"images": images, "targets": pids}

    def run_step(self):
        data = self.next_batch()
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(data)
            loss_dict = {
                "loss_cls": F.cross_entropy(out["logits"], data["targets"]),
                "loss_triplet": losses.triplet_loss(out["features"], data["targets"]),
            }
            total = sum(loss_dict.values())
        self.optimizer.zero_grad()
        self.grad_scaler.scale(total).backward()
        self._write_metrics(loss_dict)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.iter += 1

    def _write_metrics(self, loss_dict):
        metrics = {k: v.item() for k, v in loss_dict.items()}
        total = sum(metrics.values())
        if total != total or total in (float("inf"), -float("inf")):
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        if self.iter % 10 == 0:
            print(f"iter {self.iter:3d} " + " ".join(f"{k}: {v:.4f}" for k, v in metrics.items()))

    def train(self, max_iter):
        while self.iter < max_iter:
            self.run_step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Trainer().train(150)
