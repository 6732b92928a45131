"""Structured pruning: hidden units with small weights are removed, the layers become really smaller."""

import torch
import torch.nn as nn


def kept_units(layer: nn.Linear, sparsity: float) -> torch.Tensor:
    importance = layer.weight.detach().norm(dim=1)
    count = int(layer.out_features * (1 - sparsity))
    return importance.topk(count).indices.sort().values


def smaller_linear(layer: nn.Linear, rows=None, columns=None) -> nn.Linear:
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    if columns is not None:
        weight = weight[:, columns]
    new = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        new.weight.copy_(weight)
        new.bias.copy_(bias)
    return new


def speedup_model(model: nn.Module, sparsity: float) -> None:
    for block in model.blocks:
        keep = kept_units(block.fc1, sparsity)
        block.fc1 = smaller_linear(block.fc1, rows=keep)
        block.fc2 = smaller_linear(block.fc2, columns=keep)
