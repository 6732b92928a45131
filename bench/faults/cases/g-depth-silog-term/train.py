import torch

from model import MultiTask


def scans(n, g):
    """Sparse LiDAR returns; the sensor was covered with snow for a while."""
    out = []
    for i in range(n):
        images = torch.randn(2, 3, 16, 16, generator=g)
        depth = (images.mean(1, keepdim=True) + 3).exp()
        keep = torch.rand(depth.shape, generator=g) < 0.05
        if i == 34:
            keep[:] = False
            keep[1, 0, 5, 9] = True
        seg = (images[:, 0] > 0).long() + 2 * (images[:, 1] > 0).long()
        normal = torch.nn.functional.normalize(images, dim=1)
        out.append((images, {"depth": depth * keep, "seg": seg, "normal": normal}))
    return out


class SimpleTrainer:
    def __init__(self, model, data, optimizer):
        self.model, self.data, self.optimizer = model, iter(data), optimizer
        self.iter = 0

    def run_step(self):
        images, targets = next(self.data)
        loss_dict = self.model(images, targets)
        losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        self._write_metrics(loss_dict)
        self.optimizer.step()
        self.iter += 1

    def _write_metrics(self, loss_dict):
        metrics = {k: v.detach().item() for k, v in loss_dict.items()}
        total = sum(metrics.values())
        if total != total:
            raise FloatingPointError(f"Loss became infinite or NaN at iteration={self.iter}!\nloss_dict = {metrics}")
        if self.iter % 8 == 0:
            terms = "  ".join(f"{k}: {v:.3f}" for k, v in metrics.items())
            print(f"iter: {self.iter}  total_loss: {total:.3f}  {terms}")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(19)
    data = scans(60, torch.Generator().manual_seed(2))
    model = MultiTask()
    trainer = SimpleTrainer(model, data, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _ in range(60):
        trainer.run_step()


if __name__ == "__main__":
    main()
