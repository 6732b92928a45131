import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from model import SceneNet


def scenes(n, near, seed):
    g = torch.Generator().manual_seed(seed)
    depth = near + 3 * torch.rand(n, 1, 1, 1, generator=g) + torch.rand(n, 1, 8, 8, generator=g)
    label = torch.randint(0, 5, (n, 8, 8), generator=g)
    image = torch.randn(n, 3, 16, 16, generator=g) * 0.2
    image[:, :1] += F.interpolate(depth, scale_factor=2)
    image[:, 1:2] += F.interpolate(label[:, None].float(), scale_factor=2)
    return TensorDataset(image, label, depth)


def silog(log_pred, log_target, lam=0.85):
    d = log_pred - log_target
    return (d.pow(2).mean() - lam * d.mean().pow(2)).clamp(min=1e-6).sqrt()


class Trainer:
    def __init__(self):
        self.model = SceneNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.train_loader = DataLoader(scenes(96, 0.5, 1), batch_size=12, shuffle=True, num_workers=1)
        self.val_loader = DataLoader(scenes(24, 0.02, 2), batch_size=8)

    def loss(self, out, label, depth):
        return F.cross_entropy(out.segmentation, label) + silog(out.log_depth, depth.log())

    def train_epoch(self, epoch):
        self.model.train()
        for image, label, depth in self.train_loader:
            loss = self.loss(self.model(image), label, depth)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        print(f"epoch {epoch}: train {loss.item():.4f}")

    @torch.inference_mode()
    def validate(self, epoch):
        self.model.eval()
        errors, hits = [], []
        for image, label, depth in self.val_loader:
            out = self.model(image)
            errors.append(silog(out.log_depth, depth.log()).item())
            hits.append((out.segmentation.argmax(1) == label).float().mean().item())
        print(f"epoch {epoch}: silog {sum(errors) / len(errors):.4f} pixel accuracy {sum(hits) / len(hits):.3f}")

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train_epoch(epoch)
            if epoch >= 1:
                self.validate(epoch)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    Trainer().fit(3)
