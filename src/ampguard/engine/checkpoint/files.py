"""A state in a file: whole or not there, and read without executing anything."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ampguard.errors import CheckpointError


def save(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write beside `path`, then rename: a run that is killed meanwhile leaves the old file."""
    target = _path(path)
    if target.is_dir() or not target.parent.is_dir():
        why = "it is a folder" if target.is_dir() else f"there is no folder {os.fspath(target.parent)!r}"
        raise CheckpointError(f"the checkpoint {os.fspath(path)!r} was not written: {why}")
    handle, unfinished = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        torch.save(dict(state), unfinished)
        os.replace(unfinished, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def load(path: str | os.PathLike[str]) -> Any:
    """What is in the file, on the CPU. Raises CheckpointError where it is missing, truncated or no such file."""
    if not _path(path).is_file():
        why = "it is no file" if _path(path).exists() else "it is not there"
        raise CheckpointError(f"there is no checkpoint {os.fspath(path)!r}: {why}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a changed byte can send the unpickler anywhere
        raise CheckpointError(
            f"the checkpoint was not loaded: {os.fspath(path)!r} is truncated, altered, or no file of amp.save() "
            f"({type(error).__name__})\n  do    use an earlier checkpoint"
        ) from error  # whose text says what to pass to torch.load


def _path(given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise CheckpointError(f"a checkpoint is named by a path, not by a {type(given).__name__}")
    return Path(given)
