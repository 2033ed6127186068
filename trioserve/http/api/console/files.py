"""Files of the console: those in this package's folder, and no others."""

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
        "img-src 'self' data:; media-src data:; base-uri 'none'; frame-ancestors 'none'; "
        "form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of the page and its files. The page runs its own scripts only, connects to its own server
only, and can't be framed by another page.
"""


@attrs.frozen
class File:
    """A file; ``etag`` changes with its content."""

    data: bytes
    content_type: str
    etag: str


@functools.cache
def read_files() -> Mapping[str, File]:
    """Return all files by name, with slashes for folders. The first call blocks on the disk.

    They are read once, so that no request opens a file.
    """
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        content_type = _TYPES.get(path.suffix)
        if content_type is not None:
            data = path.read_bytes()
            name = path.relative_to(FOLDER).as_posix()
            files[name] = File(data, content_type, hashlib.sha256(data).hexdigest()[:32])
    return files
