"""The files that the console is made of: those of this package's folder, and no others."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import attrs

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Of the page and its files: it runs its own scripts only, talks to its own server only, and is
shown in no other page's frame."""


@attrs.frozen
class File:
    """A file; ``etag`` changes with what it says."""

    data: bytes
    content_type: str
    etag: str


@functools.cache
def read_files() -> Mapping[str, File]:
    """All of them, by their names, with slashes for folders. Blocks on the disk, the first time.

    They are read once, so that no request has a file opened, whatever it asks for.
    """
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        content_type = _TYPES.get(path.suffix)
        if content_type is not None:
            data = path.read_bytes()
            name = path.relative_to(FOLDER).as_posix()
            files[name] = File(data, content_type, hashlib.sha256(data).hexdigest()[:32])
    return files
