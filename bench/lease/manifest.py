"""The prepared folder: what is carried to the rented machine, and that it arrived whole."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.lease.plan import ROOT

FOLDER = ROOT / ".lease"
MANIFEST = "manifest.json"
WHEELS = "wheels"
CUBINS = "cubins.tar.gz"


class PreparedError(Exception):
    """A prepared folder that can't be used, or can't be made: one line."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The purpose of a prepared folder, and the digest of each of its files."""

    python: str
    target: str
    compiler: str
    commit: str
    packages: list[str]
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """A short name for exactly these files."""
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:12]

    def write(self, folder: Path) -> None:
        """Write it into ``folder``."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read that of ``folder``, and compare every file with it."""
        try:
            manifest = cls(**json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise PreparedError(f"{folder} has no {MANIFEST} that can be read: {error}") from error
        for name, digest in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise PreparedError(f"{path} is missing: prepare again, and carry the whole folder")
            if file_digest(path) != digest:
                raise PreparedError(f"{path} differs from its manifest: prepare again")
        return manifest


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
