import torch


def safe_sqrt(x, valid):
    """The square root where valid, 0 elsewhere; neither its value nor its derivative sees the others."""
    return torch.where(valid, torch.sqrt(torch.where(valid, x, 1.0)), 0.0)


def intersect(origins, directions, centre, radius):
    oc = origins - centre
    b = (oc * directions).sum(-1)
    c = oc.pow(2).sum(-1) - radius**2
    disc = b * b - c
    hit = disc > 1e-6
    depth = torch.where(hit, -b - safe_sqrt(disc, hit), 0.0)
    return depth, hit
