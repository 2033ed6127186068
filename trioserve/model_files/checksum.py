"""A fast hash that distinguishes models by their weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from trioserve.model_files.shards import read_header_bytes, shard_paths

_SAMPLES = 16
_SAMPLE_BYTES = 4096


class Checksum:
    """Hash of the added files, in order.

    It covers the headers (names, shapes and types of all tensors), the files' sizes, and a few
    kilobytes of each file, so it takes milliseconds. It doesn't detect tampering.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add_folder(self, folder: Path) -> None:
        """Add the config.json and the safetensors files of ``folder``, which may be one such file.

        Raises:
            ModelLoadError: Weights are missing or have no header.
        """
        if folder.is_dir():
            self._digest.update((folder / "config.json").read_bytes())
        for path in shard_paths(folder):
            self.add_file(path, 8 + len(read_header_bytes(path)))

    def add_file(self, path: Path, header_bytes: int) -> None:
        """Add a file of weights, whose first ``header_bytes`` bytes are its header."""
        size = path.stat().st_size
        self._digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            self._digest.update(file.read(header_bytes))
            for sample in range(_SAMPLES):
                file.seek(header_bytes + (size - header_bytes) * sample // _SAMPLES)
                self._digest.update(file.read(_SAMPLE_BYTES))

    def hexdigest(self) -> str:
        """Return 32 hexadecimal digits."""
        return self._digest.hexdigest()
