"""A state that is the same on every rank, through torch.distributed.checkpoint: what has no name in a model can be in it.

Master weights (O2), what rounding has kept (bf16-true) and averages belong to parameters by their order. Tensors are
stored one by one, all by the first rank; the rest of the state is stored as what holds them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR = "\0tensor"
WHOLE = "whole"
"""Under this key is what holds the tensors."""


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state as one flat dictionary: tensors by their path, and what holds them as bytes."""
    tensors: dict[str, Tensor] = {}
    whole = _taken_out(state, "state", tensors)
    written = io.BytesIO()
    torch.save(whole, written)
    return {WHOLE: written.getvalue(), **tensors}


def read(folder: str | os.PathLike[str]) -> Any:
    """The state that `parts_of` has taken apart. All ranks take part."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    known = FileSystemReader(os.fspath(folder)).read_metadata().state_dict_metadata
    parts: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    parts[WHOLE] = b""
    load(parts, checkpoint_id=os.fspath(folder))
    return _put_back(torch.load(io.BytesIO(parts[WHOLE]), weights_only=True), parts)


def _taken_out(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        key = path
        while key in tensors:  # 0 and "0"
            key += "'"
        tensors[key] = tree.detach()
        return {TENSOR: key}
    if isinstance(tree, Mapping):
        return {key: _taken_out(value, f"{path}.{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_taken_out(value, f"{path}.{i}", tensors) for i, value in enumerate(tree)])
    return tree


def _put_back(tree: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(tree, dict):
        if TENSOR in tree:
            return tensors[tree[TENSOR]]
        return {key: _put_back(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_put_back(value, tensors) for value in tree])
    return tree
