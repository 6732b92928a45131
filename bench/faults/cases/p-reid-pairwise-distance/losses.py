import torch
import torch.nn.functional as F


def euclidean_dist(x, y):
    m, n = x.size(0), y.size(0)
    xx = x.pow(2).sum(1, keepdim=True).expand(m, n)
    yy = y.pow(2).sum(1, keepdim=True).expand(n, m).t()
    dist = xx + yy - 2 * torch.matmul(x, y.t())
    return dist.clamp(min=1e-4).sqrt()


def hard_example_mining(dist, is_pos):
    dist_ap = (dist - 1e4 * (~is_pos).to(dist.dtype)).max(dim=1).values
    dist_an = (dist + 1e4 * is_pos.to(dist.dtype)).min(dim=1).values
    return dist_ap, dist_an


def triplet_loss(embedding, targets, margin=0.3):
    dist = euclidean_dist(embedding, embedding)
    is_pos = targets[:, None] == targets[None, :]
    dist_ap, dist_an = hard_example_mining(dist, is_pos)
    return F.relu(dist_ap - dist_an + margin).mean()
