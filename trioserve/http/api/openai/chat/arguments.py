"""A call's arguments as an object, for dialects that don't tell them as text."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_object(text: str) -> dict[str, Any]:
    """What ``text`` says as JSON; empty where it is no whole object, as in an answer cut short."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
