import torch


def masked_l1(pred, depth):
    """Mean absolute error over the pixels that the sensor measured."""
    valid = (depth > 0).float()
    err = (pred - depth).abs() * valid
    per_image = err.sum(dim=(1, 2, 3)) / valid.sum(dim=(1, 2, 3))
    return per_image.mean()


def gradient_smoothness(pred):
    dx = (pred[..., :, 1:] - pred[..., :, :-1]).abs().mean()
    dy = (pred[..., 1:, :] - pred[..., :-1, :]).abs().mean()
    return dx + dy


def depth_loss(outputs, depth, smooth=0.01):
    pred = outputs.float()
    return masked_l1(pred, depth) + smooth * gradient_smoothness(pred)
