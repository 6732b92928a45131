import torch


def intersect(origins, directions, centre, radius):
    """Distance along each ray to the sphere, 0 where the ray misses it."""
    oc = origins - centre
    b = (oc * directions).sum(-1)
    c = oc.pow(2).sum(-1) - radius**2
    disc = b * b - c
    root = torch.sqrt(disc)
    return torch.where(disc > 0, -b - root, torch.zeros_like(b))


def rays(pixels):
    """Orthographic camera that looks along z from far away."""
    origins = torch.cat([pixels, torch.full_like(pixels[:, :1], -4.0)], -1)
    directions = torch.tensor([0.0, 0.0, 1.0]).expand_as(origins)
    return origins, directions
