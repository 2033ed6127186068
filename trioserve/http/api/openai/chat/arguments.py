"""A call's arguments as an object, for APIs that don't return them as text."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_object(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``; empty if it isn't complete, as in a cut answer."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
