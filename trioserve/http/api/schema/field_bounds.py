"""Bounds of the fields of requests: every string and every JSON value has one.

A field has the bound of its type, as ``msgspec.Meta(max_length=…)``. A string without one is short
(a name, an id, a role); :data:`Text` is the type of long strings. JSON of any form is bounded in
characters, values and depth. :func:`trioserve.http.api.schema.reading.parse_body` checks these
bounds for every route. Before parsing, it counts lists, fields and values in the whole body
(:func:`trioserve.http.api.bounds.check_body`).
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any

import attrs
import msgspec

from trioserve.http.api.schema.decoding_errors import alternatives
from trioserve.protocol.errors import InvalidRequest

MAX_SHORT_CHARACTERS = 1024
MAX_TEXT_CHARACTERS = 32 << 20
"""Characters that fit into a body; the engine knows how many fit into the context."""
MAX_JSON_CHARACTERS = 1 << 20
MAX_JSON_VALUES = 1 << 17
MAX_JSON_DEPTH = 256
"""JSON schemas have two levels for each level that they describe."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS)]


@attrs.frozen
class FieldBounds:
    """Bounds that a field has."""

    name: str
    encoded_name: str
    """Name of the field in JSON."""
    short: bool
    """True if its strings are short ones."""
    free: bool
    """True if it may hold JSON of any form, or a list of such values."""
    several: bool
    """True if each item of its list is bounded by itself."""


@functools.cache
def bounds_of(request_type: type[msgspec.Struct]) -> tuple[FieldBounds, ...]:
    """Return the bounds of the fields that aren't bounded by their own types."""
    hints = typing.get_type_hints(request_type, include_extras=True)
    found = []
    names = zip(request_type.__struct_fields__, request_type.__struct_encode_fields__, strict=True)
    for name, encoded_name in names:
        leaves = [] if _is_unserved(hints[name]) else list(_unbounded(hints[name]))
        if leaves:
            free = Any in leaves
            several = free and Any not in alternatives(hints[name])
            found.append(FieldBounds(name, encoded_name, str in leaves, free, several))
    return tuple(found)


def check_fields(request: msgspec.Struct, path: str) -> None:
    """Refuse values that are too long, too large or too deep in the fields of ``request`` itself.

    Raises:
        InvalidRequest: a field is; ``param`` is its name behind ``path``.
    """
    for field in bounds_of(type(request)):
        value = getattr(request, field.name)
        if value is None or isinstance(value, (bool, int, float)):
            continue
        param = path + field.encoded_name
        if field.free and (isinstance(value, dict) or not field.several):
            _check_json(value, param)
        elif field.free and isinstance(value, list):
            for index, item in enumerate(value):
                _check_json(item, f"{param}[{index}]")
        elif field.short:
            _check_strings(value, param)


def _check_strings(value: Any, param: str) -> None:
    if isinstance(value, str):
        if len(value) > MAX_SHORT_CHARACTERS:
            raise _refusal(param, len(value), MAX_SHORT_CHARACTERS, "characters")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_strings(item, f"{param}[{index}]")
    elif isinstance(value, dict):
        for name in (*value, *value.values()):
            _check_strings(name, param)


def _check_json(value: Any, param: str) -> None:
    """Refuse JSON that is too large or too deep, level by level."""
    level: list[Any] = [[value]]
    num_values = num_characters = depth = 0
    while level:
        below: list[Any] = []
        for container in level:
            num_values += len(container)
            if num_values > MAX_JSON_VALUES:
                raise _refusal(param, num_values, MAX_JSON_VALUES, "values")
            items: Iterable[Any] = container
            if isinstance(container, dict):
                num_characters += sum(map(len, container))
                items = container.values()
            for item in items:
                kind = type(item)
                if kind is str:
                    num_characters += len(item)
                elif kind is dict or kind is list:
                    below.append(item)
        if num_characters > MAX_JSON_CHARACTERS:
            raise _refusal(param, num_characters, MAX_JSON_CHARACTERS, "characters")
        if depth > MAX_JSON_DEPTH:
            raise InvalidRequest(
                f"{param} is nested too deeply: at most {MAX_JSON_DEPTH} levels are read",
                param=param,
                code="invalid_value",
            )
        level, depth = below, depth + 1


def _refusal(param: str, number: int, most: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has {number} {what}; at most {most} are read", param=param, code="invalid_value"
    )


def _is_unserved(annotation: Any) -> bool:
    """Return whether only a few values of a field are served: see :func:`.schemas.only`."""
    return any("only" in (meta.extra or ()) for meta in getattr(annotation, "__metadata__", ()))


def _unbounded(annotation: Any) -> Iterable[Any]:
    """Yield each ``str`` and ``Any`` in ``annotation`` that it doesn't bound."""
    if annotation is str or annotation is Any:
        yield annotation
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        metas = [each for each in annotation.__metadata__ if isinstance(each, msgspec.Meta)]
        bounded = any(meta.max_length is not None or meta.pattern is not None for meta in metas)
        if not (bounded and annotation.__origin__ is str):
            yield from _unbounded(annotation.__origin__)
    elif origin is dict and typing.get_args(annotation)[1] is Any:
        yield Any
    elif origin in (typing.Union, types.UnionType, list, dict):
        for each in typing.get_args(annotation):
            yield from _unbounded(each)
