"""One archive for all that a part leaves: its tables and the ends of its logs."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

_LOG_BYTES = 128 << 10
"""The end of a log that is kept: sixty logs stay far below what one file may have."""
_MAX_MEMBER = 16 << 20


def pack(folder: Path, archive: Path) -> None:
    """Put the files under ``folder`` into ``archive``, which is there whole or as it was."""
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=3) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                _add(tar, path, str(path.relative_to(folder)))
    part.replace(archive)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    data = path.read_bytes()  # read once: a log may grow meanwhile
    if path.suffix == ".log":
        data = data[-_LOG_BYTES:]
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mtime = int(path.stat().st_mtime)
    tar.addfile(entry, io.BytesIO(data))


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of each plain file in ``archive`` of a sensible size."""
    with tarfile.open(archive, "r:gz") as tar:
        for entry in tar:
            file = tar.extractfile(entry) if entry.isreg() and entry.size <= _MAX_MEMBER else None
            if file is not None:
                yield entry.name, file.read()
