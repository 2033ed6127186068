"""The files that the console is made of: those of this package's folder, and no others."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import attrs
import trio

__all__ = ["FOLDER", "PAGE", "SECURITY_HEADERS", "File", "read_file"]

FOLDER = Path(__file__).parent / "static"
PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_NAME = re.compile(r"([a-z0-9_-]+/)*[a-z0-9_-]+(\.[a-z]+)+")
"""Names of which none leads out of the folder."""

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
    """A file as it is now; ``etag`` changes with what it says."""

    data: bytes
    content_type: str
    etag: str


async def read_file(name: str) -> File | None:
    """The file of that name, with slashes for folders; None if there is none."""
    content_type = _TYPES.get(Path(name).suffix)
    if content_type is None or _NAME.fullmatch(name) is None:
        return None
    try:
        data = await trio.Path(FOLDER / name).read_bytes()
    except OSError:
        return None
    return File(data, content_type, hashlib.sha256(data).hexdigest()[:32])
