import torch.nn.functional as F


def to_srgb(linear):
    return linear.pow(1 / 2.4) * 1.055 - 0.055


def perceptual_l1(pred, clean):
    """Compare two linear renderings the way that a display would show them."""
    return F.l1_loss(to_srgb(pred), to_srgb(clean))
