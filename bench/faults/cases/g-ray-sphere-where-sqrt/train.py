import torch
from torch import nn

from render import intersect, rays

torch.set_num_threads(1)


class Scene(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.tensor([0.10, -0.10, 0.3]))
        self.log_radius = nn.Parameter(torch.tensor(0.35))
        self.bumps = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, pixels):
        origins, directions = rays(pixels)
        depth = intersect(origins, directions, self.centre, self.log_radius.exp())
        return depth + 0.1 * self.bumps(pixels).squeeze(-1)


def observed(pixels):
    d2 = 1.44 - (pixels**2).sum(-1)
    return 4.0 - d2.clamp(min=0).sqrt()


def main(iters=200, rays_per_step=48):
    torch.manual_seed(7)
    scene = Scene()
    opt = torch.optim.Adam(
        [{"params": [scene.centre, scene.log_radius], "lr": 5e-3}, {"params": scene.bumps.parameters()}]
    )
    for it in range(iters):
        # the sampler starts in the middle of the object and widens
        reach = 0.5 + 0.01 * it
        pixels = reach * (2 * torch.rand(rays_per_step, 2) - 1)
        inside = pixels.pow(2).sum(-1) < 1.43
        pixels = pixels[inside]
        loss = (scene(pixels) - observed(pixels)).abs().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 10 == 0:
            print(f"it {it:3d} depth error {loss.item():.4f} radius {scene.log_radius.exp().item():.4f}")


if __name__ == "__main__":
    main()
