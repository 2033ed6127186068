"""The place for a large temporary folder: checked before anything is written."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu.weights.expected import expected_tensors
from trioserve.model_files import ModelConfig

# A tokenizer, an index, and the like beside the weights.
_BESIDE_WEIGHTS = 256 << 20


class NoRoomError(OSError):
    """No folder has the room that is needed: one line with every folder's figures."""


def model_bytes(config: ModelConfig) -> int:
    """Return the bytes of a model of this shape on disk, in 16 bits."""
    return 2 * sum(map(math.prod, expected_tensors(config).values())) + _BESIDE_WEIGHTS


def temporary_folders() -> list[Path]:
    """Return the folders for temporary files: memory first, where there is such a folder."""
    return [each for each in (Path("/dev/shm"), Path(tempfile.gettempdir())) if each.is_dir()]


def folder_with_room(
    needed: int,
    folders: Sequence[Path],
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
) -> Path:
    """Return the first of ``folders`` with ``needed`` free bytes."""
    room = {folder: free(folder) for folder in folders}
    for folder, available in room.items():
        if available >= needed:
            return folder
    listed = ", ".join(f"{folder} has {size / 1e9:.1f} GB" for folder, size in room.items())
    raise NoRoomError(f"{needed / 1e9:.1f} GB of free space are needed: {listed}")
