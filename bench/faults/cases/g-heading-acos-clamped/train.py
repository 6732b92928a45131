import torch
import torch.nn as nn


class HeadingLoss(nn.Module):
    """Angle between two unit vectors, in radians."""

    def forward(self, pred, gt):
        cos = (pred * gt).sum(-1).clamp(-1.0, 1.0)
        return torch.acos(cos).mean()


class Odometry(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.rnn = nn.GRU(6, hidden, batch_first=True)
        self.heading = nn.Linear(hidden, 2)

    def forward(self, imu):
        h, _ = self.rnn(imu)
        v = self.heading(h[:, -1])
        return v / v.norm(dim=-1, keepdim=True).clamp_min(1e-6)


def drive(n, g, t=12):
    yaw_rate = 0.15 * torch.randn(n, t, generator=g)
    yaw = yaw_rate.cumsum(1)
    imu = torch.cat([yaw_rate[..., None], torch.cos(yaw)[..., None], torch.sin(yaw)[..., None]], -1)
    imu = torch.cat([imu, 0.02 * torch.randn(n, t, 3, generator=g)], -1)
    return imu, torch.stack([torch.cos(yaw[:, -1]), torch.sin(yaw[:, -1])], -1)


def fit(model, loss_fn, data, optimizer, epochs, batch_size=24):
    imu, gt = data
    step = 0
    for epoch in range(epochs):
        perm = torch.randperm(len(imu))
        total = 0.0
        for idx in perm.split(batch_size):
            optimizer.zero_grad()
            loss = loss_fn(model(imu[idx]), gt[idx])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item()
            step += 1
        print(
            f"epoch {epoch}: heading error {57.2958 * total / len(perm.split(batch_size)):.3f} deg after {step} steps"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(14)
    model = Odometry()
    data = drive(768, torch.Generator().manual_seed(2))
    fit(model, HeadingLoss(), data, torch.optim.AdamW(model.parameters(), lr=3e-3), epochs=6)
