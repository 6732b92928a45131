import torch
from torch import nn

from render import intersect


class Scene(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.tensor([0.2, -0.1, 0.2]))
        self.log_radius = nn.Parameter(torch.tensor(0.0))
        self.albedo = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, pixels):
        origins = torch.cat([pixels, torch.full_like(pixels[:, :1], -4.0)], -1)
        directions = torch.tensor([0.0, 0.0, 1.0]).expand_as(origins)
        depth, hit = intersect(origins, directions, self.centre, self.log_radius.exp())
        return depth, hit, self.albedo(pixels).squeeze(-1)


def target(pixels):
    d2 = 1.44 - pixels.pow(2).sum(-1)
    return torch.where(d2 > 0, 4.0 - d2.clamp(min=0).sqrt(), 0.0), d2 > 0


def main():
    torch.set_num_threads(1)
    torch.manual_seed(7)
    scene = Scene()
    opt = torch.optim.Adam(scene.parameters(), lr=1e-2)
    for it in range(120):
        pixels = 3 * torch.rand(64, 2) - 1.5
        depth, hit, albedo = scene(pixels)
        wanted, inside = target(pixels)
        both = hit & inside
        loss = ((depth - wanted).abs() * both).sum() / both.sum().clamp(min=1)
        loss = loss + nn.functional.binary_cross_entropy(albedo, inside.float())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 15 == 0:
            print(
                f"it {it:3d} loss {loss.item():.4f} misses {int((~hit).sum())} radius {scene.log_radius.exp().item():.3f}"
            )
    print(f"final loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
