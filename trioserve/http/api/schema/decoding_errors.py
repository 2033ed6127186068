"""Errors of a body that msgspec refuses: the field, what it must be and what it was."""

from __future__ import annotations

import functools
import re
import types
import typing
from typing import Any

import msgspec

from trioserve.protocol.errors import InvalidRequest

MAX_REREAD_BYTES = 1 << 20
"""Largest body that is parsed a second time, which takes Python some 50 ms."""
_MAX_SHOWN_CHARACTERS = 60
_MAX_MESSAGE_CHARACTERS = 2000
"""Longest message of msgspec that is sent whole. A longer one quotes the client's input; its middle
is left out.
"""

_ERROR_PATTERN = re.compile(
    r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL
)
_FIELD_PATTERN = re.compile(
    r"Object (?P<what>contains unknown|missing required) field `(?P<field>[^`]*)`", re.DOTALL
)
_STEP_PATTERN = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_INSIDE_A_MAP = "[...]"
"""msgspec's name of a map's value, for every key."""


def as_invalid_request(message: str, type_: Any, body: bytes) -> InvalidRequest:
    """Return msgspec's message as an error, with its JSON path turned into the name of a field.

    Args:
        type_: the expected type of ``body``; the accepted values are looked up in it.
        body: the decoded body; the wrong value is looked up in it.
    """
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        half = _MAX_MESSAGE_CHARACTERS // 2
        message = f"{message[:half]}…{message[-half:]}"
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
    wrong = _plain(text)
    if not path:
        return InvalidRequest(f"the body is not a request: {wrong}")
    path, inside, _ = path.partition(_INSIDE_A_MAP)
    if match["key"]:
        wrong = _wrong_entry(type_, path, body) or f"{wrong} as a key"
    elif inside:
        wrong = _wrong_entry(type_, path, body) or f"{wrong} as each value"
    elif wrong.startswith("invalid "):
        wrong += _choices(type_, path)
    else:
        wrong += _given(wrong, path, body)
    return InvalidRequest(f"{path}: {wrong}", param=path, code="invalid_value")


def _plain(text: str) -> str:
    """Return msgspec's words for a wrong value without their marks."""
    plain = text.replace("`", "").replace(" | ", " or ")
    return plain[:1].lower() + plain[1:]


def _choices(type_: Any, path: str) -> str:
    """Return the accepted values of a field, for the end of a message that names a refused one."""
    reached, values = _reached(type_, path)
    for each in reached:
        if typing.get_origin(each) is typing.Literal:
            values += typing.get_args(each)
    return f", expected one of {', '.join(map(str, values))}" if values else ""


def _reached(type_: Any, path: str) -> tuple[list[Any], list[Any]]:
    """Return the types that a field may have, and the tags of structs if it is their tag."""
    reached: list[Any] = [type_]
    values: list[Any] = []
    for name, index in _STEP_PATTERN.findall(path):
        holders = [each for held in reached for each in alternatives(held)]
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
    return [each for held in reached for each in alternatives(held)], values


@functools.cache
def _hints(holder: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the evaluated annotations of a class, which is slow for one with many fields."""
    return typing.get_type_hints(holder, include_extras=True)


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that ``annotation`` is a union of, without their metadata."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return alternatives(annotation.__origin__)
    if origin in (types.UnionType, typing.Union):
        return [each for held in typing.get_args(annotation) for each in alternatives(held)]
    return [annotation]


def _given(wrong: str, path: str, body: bytes) -> str:
    """Return the field's value, for the end of a message that only says what it must be."""
    if not wrong.startswith("expected ") or ", got " in wrong or len(body) > MAX_REREAD_BYTES:
        return ""
    try:
        value = _value_at(path, body)
        if " of length " in wrong:
            return f", got {len(value)}"
    except (LookupError, TypeError):
        return ""
    return f", got {_shown(value)}"


def _wrong_entry(type_: Any, path: str, body: bytes) -> str:
    """Return what is wrong with the first wrong entry of a map, or nothing if it isn't found."""
    maps = [each for each in _reached(type_, path)[0] if typing.get_origin(each) is dict]
    if len(maps) != 1 or len(body) > MAX_REREAD_BYTES:
        return ""
    key_type, value_type = typing.get_args(maps[0])
    try:
        entries = _value_at(path, body).items()
    except (LookupError, TypeError, AttributeError):
        return ""
    for key, value in entries:
        if wrong := _conversion_error(key, key_type):
            return f"{wrong} as a key, got {_shown(key)}"
        if wrong := _conversion_error(value, value_type):
            given = "" if ", got " in wrong else f", got {_shown(value)}"
            return f"{wrong} for the key {_shown(key)}{given}"
    return ""


def _conversion_error(value: Any, type_: Any) -> str:
    try:
        msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        match = _ERROR_PATTERN.fullmatch(str(error))
        assert match is not None
        return _plain(match["text"])
    return ""


def _value_at(path: str, body: bytes) -> Any:
    """Return the value of the field that ``path`` names.

    Bytes behind a wrong value haven't been checked before. They may not be JSON, or may hold the
    same key again with another kind of value.

    Raises:
        LookupError: there is no such field, or no JSON.
        TypeError: a value on the path is of another kind.
    """
    try:
        value: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LookupError(path) from error
    for name, index in _STEP_PATTERN.findall(path):
        value = value[name] if name else value[int(index)]
    return value


def _shown(value: Any) -> str:
    shown = msgspec.json.encode(value).decode()
    if len(shown) > _MAX_SHOWN_CHARACTERS:
        shown = shown[:_MAX_SHOWN_CHARACTERS] + "…"
    return shown
