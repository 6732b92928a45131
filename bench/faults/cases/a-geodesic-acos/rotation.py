import torch
import torch.nn.functional as F


def from_6d(v):
    a = F.normalize(v[..., :3], dim=-1)
    b = v[..., 3:] - (a * v[..., 3:]).sum(-1, keepdim=True) * a
    b = F.normalize(b, dim=-1)
    return torch.stack([a, b, torch.cross(a, b, dim=-1)], dim=-2)


def geodesic(r1, r2):
    m = r1 @ r2.transpose(-1, -2)
    cos = (m.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return torch.acos(cos)
