"""What a body that msgspec doesn't take is told: the field, what it must be and what it was."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from trioserve.errors import InvalidRequest

__all__ = ["MAX_REREAD_BYTES", "as_invalid_request"]

MAX_REREAD_BYTES = 1 << 20
"""Largest body that is read a second time, which takes Python some 50 ms."""
_MAX_SHOWN_CHARACTERS = 60

_ERROR_PATTERN = re.compile(
    r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL
)
_FIELD_PATTERN = re.compile(
    r"Object (?P<what>contains unknown|missing required) field `(?P<field>[^`]*)`", re.DOTALL
)
_STEP_PATTERN = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_INSIDE_A_MAP = "[...]"
"""How msgspec calls a map's value, whatever its key."""


def as_invalid_request(message: str, body: bytes) -> InvalidRequest:
    """msgspec's message with its JSON path turned into the name of a field.

    Args:
        body: what was decoded; the value that was wrong is looked up in it.
    """
    match = _ERROR_PATTERN.fullmatch(message)
    assert match is not None
    text, path = match["text"], (match["path"] or "").lstrip(".")
    field = _FIELD_PATTERN.fullmatch(text)
    if field is not None:
        param = f"{path}.{field['field']}" if path else field["field"]
        if field["what"] == "contains unknown":
            return InvalidRequest(
                f"{param} is not a field of this request", param=param, code="unknown_parameter"
            )
        return InvalidRequest(f"{param} is missing", param=param, code="missing_required_parameter")
    wrong = text.replace("`", "").replace(" | ", " or ")
    wrong = wrong[:1].lower() + wrong[1:]
    if not path:
        return InvalidRequest(f"the body is not a request: {wrong}")
    path, inside, _ = path.partition(_INSIDE_A_MAP)
    if match["key"]:
        wrong += " as a key"
    elif inside:
        wrong += " as each value"
    else:
        wrong += _given(wrong, path, body)
    return InvalidRequest(f"{path}: {wrong}", param=path, code="invalid_value")


def _given(wrong: str, path: str, body: bytes) -> str:
    """What the field was, for the end of a message that says what it must be and no more."""
    if not wrong.startswith("expected ") or ", got " in wrong or len(body) > MAX_REREAD_BYTES:
        return ""
    value: Any = msgspec.json.decode(body)
    for name, index in _STEP_PATTERN.findall(path):
        value = value[name] if name else value[int(index)]
    if " of length " in wrong:
        return f", got {len(value)}"
    shown = msgspec.json.encode(value).decode()
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = shown[:_MAX_SHOWN_CHARACTERS] + "…"
    return f", got {shown}"
