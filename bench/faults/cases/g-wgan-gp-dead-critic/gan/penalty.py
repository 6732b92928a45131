import torch


def gradient_penalty(critic, real, fake, weight=10.0):
    eps = torch.rand(len(real), 1)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    scores = critic(mixed)
    (grads,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True, retain_graph=True)
    norms = torch.sqrt(torch.sum(grads**2, dim=1))
    return weight * ((norms - 1) ** 2).mean()
