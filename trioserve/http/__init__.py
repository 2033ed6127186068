"""The HTTP side: an ASGI application over an engine, and a hardened server for it.

:func:`create_app` returns an application for any hypercorn. :func:`serve_app` runs it on sockets of
our own, with limits and deadlines. Both are loaded on first use.

Imported by ``front_ends``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trioserve.http.api.app import create_app
    from trioserve.http.server.server import serve_app

__all__ = ["create_app", "serve_app"]

_HOME = {
    "create_app": "api.app",
    "serve_app": "server.server",
}


def load() -> None:
    """Load both now. That takes about 0.2 s, which another thread can do something else in."""
    for name in _HOME:
        __getattr__(name)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trioserve.http' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trioserve.http.{_HOME[name]}"), name)
    globals()[name] = value
    return value
