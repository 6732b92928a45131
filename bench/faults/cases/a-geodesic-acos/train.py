import torch
from torch import nn

from rotation import from_6d, geodesic


class PoseNet(nn.Module):
    def __init__(self, points=12):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3 * points, 128), nn.LeakyReLU(), nn.Linear(128, 6))

    def forward(self, cloud):
        return from_6d(self.mlp(cloud.flatten(1)))


class Annotations:
    """Rotation matrices as the annotation tool wrote them: three decimals."""

    def __init__(self, n=512):
        self.shape = torch.randn(12, 3)
        poses = from_6d(torch.tensor([1.0, 0, 0, 0, 1, 0]) + 0.2 * torch.randn(n, 6))
        self.poses = torch.tensor([[[float(f"{v:.3f}") for v in row] for row in pose] for pose in poses.tolist()])

    def batches(self, size=16):
        for idx in torch.randperm(len(self.poses)).split(size):
            target = self.poses[idx]
            yield self.shape @ target.transpose(-1, -2), target


def main(epochs=4):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = Annotations()
    model = PoseNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    for _ in range(epochs):
        for cloud, target in data.batches():
            loss = geodesic(model(cloud), target).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step} geodesic error {torch.rad2deg(loss).item():.3f} deg")
            step += 1


if __name__ == "__main__":
    main()
