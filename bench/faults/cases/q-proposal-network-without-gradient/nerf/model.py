import torch
import torch.nn.functional as F
from torch import nn


class DensityField(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, positions):
        x = torch.cat([positions.sin(), positions.cos()], -1)
        return F.softplus(self.mlp(x)).squeeze(-1)


class ColorField(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.density = nn.Linear(width, 1)
        self.rgb = nn.Linear(width, 3)

    def forward(self, positions):
        h = self.base(torch.cat([positions.sin(), positions.cos()], -1))
        return F.softplus(self.density(h)).squeeze(-1), torch.sigmoid(self.rgb(h))


def weights_of(density, delta):
    alpha = 1 - torch.exp(-density.float() * delta)
    transmittance = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-6], -1), -1)[:, :-1]
    return alpha * transmittance


class NerfModel(nn.Module):
    """A proposal field places the samples, the final field colours them."""

    def __init__(self, warmup=12, update_every=5):
        super().__init__()
        self.proposal_networks = nn.ModuleList([DensityField()])
        self.field = ColorField()
        self.warmup, self.update_every = warmup, update_every
        self.step = 0

    def get_param_groups(self):
        return {
            "proposal_networks": list(self.proposal_networks.parameters()),
            "fields": list(self.field.parameters()),
        }

    def sample(self, origins, directions):
        edges = torch.linspace(0, 4, 17)
        mids = ((edges[1:] + edges[:-1]) / 2).expand(len(origins), -1)
        updated = self.step < self.warmup or self.step % self.update_every == 0
        with torch.set_grad_enabled(torch.is_grad_enabled() and updated):
            density = self.proposal_networks[0](origins[:, None] + mids[..., None] * directions[:, None])
            weights = weights_of(density, 0.25)
        return mids, weights

    def forward(self, origins, directions):
        mids, proposal = self.sample(origins, directions)
        density, rgb = self.field(origins[:, None] + mids[..., None] * directions[:, None])
        weights = weights_of(density, 0.25)
        color = (weights[..., None] * rgb.float()).sum(1)
        return {"rgb": color, "weights": weights, "proposal_weights": proposal}

    def get_loss_dict(self, outputs, target):
        interlevel = F.relu(outputs["weights"].detach() - outputs["proposal_weights"]).square().sum(-1).mean()
        return {"rgb_loss": F.mse_loss(outputs["rgb"], target), "interlevel_loss": interlevel}
