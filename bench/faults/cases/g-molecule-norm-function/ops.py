"""Row norms with a cheap backward: keeps the norm that the forward pass computed."""

import torch


class RowNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        norm = (x * x).sum(-1, keepdim=True).sqrt()
        ctx.save_for_backward(x, norm)
        return norm

    @staticmethod
    def backward(ctx, grad_output):
        x, norm = ctx.saved_tensors
        scale = grad_output / norm
        return scale * x


row_norm = RowNorm.apply
