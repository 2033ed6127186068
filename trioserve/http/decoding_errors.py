"""What a body that msgspec doesn't take is told: the field, what it must be and what it was."""

from __future__ import annotations

import functools
import re
import types
import typing
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


def as_invalid_request(message: str, type_: Any, body: bytes) -> InvalidRequest:
    """msgspec's message with its JSON path turned into the name of a field.

    Args:
        type_: what ``body`` was to be; the values that would have been right are looked up in it.
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
    elif wrong.startswith("invalid "):
        wrong += _choices(type_, path)
    else:
        wrong += _given(wrong, path, body)
    return InvalidRequest(f"{path}: {wrong}", param=path, code="invalid_value")


def _choices(type_: Any, path: str) -> str:
    """What the field may be, for the end of a message that says what it may not be."""
    reached: list[Any] = [type_]
    values: list[Any] = []
    for name, index in _STEP_PATTERN.findall(path):
        holders = [each for held in reached for each in _alternatives(held)]
        reached = []
        for holder in holders:
            if index and typing.get_origin(holder) is list:
                reached += typing.get_args(holder)
            elif name and isinstance(holder, type) and issubclass(holder, msgspec.Struct):
                if holder.__struct_config__.tag_field == name:
                    values.append(holder.__struct_config__.tag)
                else:
                    hints = _hints(holder)
                    reached += [hints[name]] if name in hints else []
    for each in (each for held in reached for each in _alternatives(held)):
        if typing.get_origin(each) is typing.Literal:
            values += typing.get_args(each)
    return f", expected one of {', '.join(map(str, values))}" if values else ""


@functools.cache
def _hints(holder: type[msgspec.Struct]) -> dict[str, Any]:
    """The annotations of a class, evaluated, which takes long for one with many fields."""
    return typing.get_type_hints(holder, include_extras=True)


def _alternatives(annotation: Any) -> list[Any]:
    """The types that ``annotation`` is one of, without what is said about them."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(annotation.__origin__)
    if origin in (types.UnionType, typing.Union):
        return [each for held in typing.get_args(annotation) for each in _alternatives(held)]
    return [annotation]


def _given(wrong: str, path: str, body: bytes) -> str:
    """What the field was, for the end of a message that says what it must be and no more."""
    if not wrong.startswith("expected ") or ", got " in wrong or len(body) > MAX_REREAD_BYTES:
        return ""
    # What comes behind the wrong value has not been looked at: it may be no JSON, or have the same
    # key once more, with another kind of value.
    try:
        value: Any = msgspec.json.decode(body)
        for name, index in _STEP_PATTERN.findall(path):
            value = value[name] if name else value[int(index)]
        if " of length " in wrong:
            return f", got {len(value)}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return ""
    shown = msgspec.json.encode(value).decode()
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = shown[:_MAX_SHOWN_CHARACTERS] + "…"
    return f", got {shown}"
