"""Values in tags: plain strings or JSON, by their schema."""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 8
"""Deepest level at which a schema's alternatives are searched."""
_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (str, ("string",)),
    (list, ("array",)),
    (dict, ("object",)),
    (type(None), ("null",)),
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's literals that models write for JSON's."""
_CONTAINERS = frozenset(("array", "object"))
_MAX_LITERAL_CHARACTERS = 20_000
"""Longest Python literal that is parsed; parsing takes hundreds of bytes per character."""


def property_schema(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of one argument, with the definitions that it may reference."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(found, dict):
        return {}
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **found}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of values in a schema; empty if it has none."""
    return frozenset(_types(schema, schema, 0))


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return True if a schema allows only strings."""
    return types_of(schema) == {"string"}


def as_json(text: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of a value in a tag.

    The text is read as JSON if the schema allows such a value, and is a string otherwise. An array
    or object may also be JSON with escaped quotes, as GLM sometimes writes it, or a Python literal.
    """
    stripped = text.strip()
    stripped = _PYTHON_WORDS.get(stripped, stripped)
    types = types_of(schema)
    written, value = stripped, _read(stripped)
    if value is _NOTHING and types & _CONTAINERS and stripped[:1] in ("[", "{"):
        written = _repaired(stripped)
        value = _read(written)
    if value is not _NOTHING:
        fitting = next(names for kind, names in _TYPES if isinstance(value, kind))
        if types.intersection(fitting) or "string" not in types:
            return written
    return escaped(text.removeprefix("\n").removesuffix("\n"), quote=True)


_NOTHING = object()


def _read(text: str) -> Any:
    """Return the value of a valid JSON text; ``_NOTHING`` for any other text."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return _NOTHING


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is more than a double holds")
    return value


def _repaired(text: str) -> str:
    """Return the JSON of an array or object in another notation; empty if it is invalid."""
    try:
        unescaped = str(json.loads(f'"{text}"'))
        unescaped.encode()  # An escape may be half of a character, which can't be sent.
    except (ValueError, RecursionError):
        unescaped = ""
    if unescaped != text and _read(unescaped) is not _NOTHING:
        return unescaped
    if len(text) > _MAX_LITERAL_CHARACTERS:
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # About unknown escapes in strings.
            value = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ""
    return written


def escaped(text: str, *, quote: bool = False) -> str:
    """Return ``text`` escaped for JSON, with its quotes or without."""
    written = json.dumps(text, ensure_ascii=False)
    return written if quote else written[1:-1]


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        found |= {each for each in given if isinstance(each, str)}
    if not found:
        values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        found = {
            next(names[0] for kind, names in _TYPES if isinstance(value, kind)) for value in values
        }
    for name in ("anyOf", "oneOf", "allOf"):
        for each in _listed(schema.get(name)):
            found |= _types(each, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        found |= _types(_referred(reference, root), root, depth + 1)
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition for a reference such as ``#/$defs/name``."""
    held: Any = root
    for part in reference.removeprefix("#/").split("/"):
        held = held.get(part) if isinstance(held, Mapping) else None
    return held
