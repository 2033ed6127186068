"""Tables made from the routes and their classes: endpoints, fields of requests and answers.

Nothing in them is written by hand. A field's meaning comes from its class. The definition that
decodes requests says also whether a field is served, accepted without influence, or refused.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import attrs
import msgspec
from peers import peers_of

from trioserve.http.api.dialects import error_body
from trioserve.http.api.openai.schemas import GenerationRequest
from trioserve.http.api.openapi import openapi_path
from trioserve.http.api.route import GROUPS, Route
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.reading import struct_classes

__all__ = [
    "Field",
    "answer_classes",
    "answer_lines",
    "endpoint_lines",
    "field_lines",
    "fields_of",
    "request_classes",
]

HINT = "Accepted; it has no influence on the output."
_SIMPLE = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    bytes: "file",
    Any: "anything",
}


@attrs.frozen
class Field:
    """A field as the tables show it; ``refused`` is why ``accepted`` is the only value served."""

    name: str
    kind: str
    meaning: str
    required: bool
    accepted: str = ""
    refused: str = ""

    @property
    def is_served(self) -> bool:
        """True if the field has an influence."""
        return not self.accepted and self.meaning != HINT


def request_classes() -> list[type[msgspec.Struct]]:
    """Return every class that a request may hold."""
    given = [type_ for route in ROUTES for type_ in (route.request, route.query)]
    return struct_classes(type_ for type_ in given if type_ is not None)


def fields_of(cls: type[msgspec.Struct]) -> list[Field]:
    """Return the fields of a class, in its order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [
        _field(field.encode_name, hints[field.name], field.required)
        for field in msgspec.structs.fields(cls)
    ]
    config = cls.__struct_config__
    if config.tag_field is not None:
        kind = f'`"{config.tag}"`'
        fields.insert(0, Field(config.tag_field, kind, "Says which kind this is.", required=True))
    return fields


def _field(name: str, annotation: Any, required: bool) -> Field:
    meaning = accepted = refused = ""
    for meta in getattr(annotation, "__metadata__", ()):
        meaning = meaning or meta.description or ""
        if meta.extra and "only" in meta.extra:
            accepted, refused = meta.extra["shown"], meta.extra["why"]
    return Field(name, type_text(annotation), meaning, required, accepted, refused)


def type_text(annotation: Any) -> str:
    """Return a type in words, without ``null``, which always means "not given"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0]) + _range(annotation.__metadata__)
    if origin in (typing.Union, UnionType):
        kinds = [type_text(item) for item in arguments if item not in (NoneType, msgspec.UnsetType)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is list:
        item = type_text(arguments[0])
        return f"list of ({item})" if " or " in item else f"list of {item}"
    if origin is dict:
        return "object"
    if origin is tuple:
        return "[" + ", ".join(map(type_text, arguments)) + "]"
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return "null"


def _range(metadata: Sequence[msgspec.Meta]) -> str:
    texts = []
    for meta in metadata:
        for word, bound in (("from", meta.ge), ("above", meta.gt), ("to", meta.le)):
            if bound is not None and abs(bound) < 2**31 - 1:
                texts.append(f"{word} {bound:g}")
    return f" ({' '.join(texts)})" if texts else ""


def endpoint_lines() -> Iterator[str]:
    """Yield a table of the endpoints, group by group."""
    yield "| Endpoint | What it does | As in |"
    yield "| --- | --- | --- |"
    for group in GROUPS:
        yield f"| **{group}** | | |"
        for route in ROUTES:
            if route.group == group:
                paths = "<br>".join(
                    f"`{route.method} {openapi_path(rule)}`" for rule in route.rules
                )
                yield f"| {paths} | {route.summary} | {route.peers or '—'} |"


def field_lines() -> Iterator[str]:
    """Yield a section for each request, then one for each class that requests hold."""
    shown: list[type[msgspec.Struct]] = [GenerationRequest]
    shared = [route for route in ROUTES if _shares_fields(route)]
    titles = [f"`{route.method} {route.rule}`" for route in shared]
    yield f"### Fields of both {' and '.join(titles)}"
    yield ""
    names = tuple(route.request.__name__ for route in shared if route.request is not None)
    yield from _tables(fields_of(GenerationRequest), names)
    for route in ROUTES:
        if route.request is None:
            continue
        yield f"### `{route.method} {route.rule}`"
        yield ""
        fields = fields_of(route.request)
        if route in shared:
            own = {field.name for field in fields_of(GenerationRequest)}
            fields = [field for field in fields if field.name not in own]
        yield from _tables(fields, (route.request.__name__,))
        shown.append(route.request)
    for cls in request_classes():
        if cls not in shown:
            yield f"### {cls.__name__}"
            yield ""
            yield _paragraphs(cls)
            yield ""
            yield from _tables(fields_of(cls), (cls.__name__,))


def answer_classes() -> list[type[msgspec.Struct]]:
    """Return every class that an answer or an event may hold."""
    types = [type_ for route in ROUTES for type_ in (route.response, route.events)]
    return struct_classes([*types, *(error_body(route.rule) for route in ROUTES)])


def answer_lines() -> Iterator[str]:
    """Yield a section for each class that answers and events hold."""
    for cls in answer_classes():
        yield f"### {cls.__name__}"
        yield ""
        yield _paragraphs(cls)
        yield ""
        yield from _where(cls)
        yield "| Field | Value | Meaning |"
        yield "| --- | --- | --- |"
        for field in fields_of(cls):
            yield _row(f"`{field.name}`", field.kind, field.meaning)
        yield ""


def _where(cls: type[msgspec.Struct]) -> Iterator[str]:
    """Yield the endpoints that answer with a class or send it as an event."""
    for text, routes in (
        ("The answer of", [route for route in ROUTES if route.response == cls]),
        ("An event of", [route for route in ROUTES if cls in _alternatives(route.events)]),
    ):
        if routes:
            names = (f"`{route.method} {openapi_path(route.rule)}`" for route in routes)
            yield f"{text} {', '.join(names)}."
            yield ""


def _alternatives(events: Any) -> tuple[Any, ...]:
    """Return the classes that an event may have."""
    return typing.get_args(events) or (events,)


def _shares_fields(route: Route) -> bool:
    return route.request is not None and issubclass(route.request, GenerationRequest)


def _paragraphs(cls: type) -> str:
    """Return a class's docstring as Markdown."""
    text = inspect.getdoc(cls) or ""
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")


def _tables(fields: Sequence[Field], class_names: tuple[str, ...]) -> Iterator[str]:
    """Yield tables of the fields: served, without influence, and refused with the reason."""
    served = [field for field in fields if field.is_served]
    refused = [field for field in fields if field.accepted]
    hints = [field for field in fields if field.meaning == HINT]
    if served:
        yield "| Field | Value | Meaning | Of |"
        yield "| --- | --- | --- | --- |"
        for field in served:
            name = f"`{field.name}`" + (" (required)" if field.required else "")
            peers = ", ".join(peers_of(class_names, field.name))
            yield _row(name, field.kind, field.meaning, peers)
        yield ""
    if hints:
        names = ", ".join(f"`{field.name}`" for field in hints)
        yield f"Accepted, whatever they say, because they ask nothing of the output: {names}."
        yield ""
    if refused:
        yield "Known and refused:"
        yield ""
        yield "| Field | Accepted | Why nothing else | Of |"
        yield "| --- | --- | --- | --- |"
        for field in refused:
            peers = ", ".join(peers_of(class_names, field.name))
            why = field.refused[:1].upper() + field.refused[1:] + "." if field.refused else ""
            yield _row(f"`{field.name}`", f"`{field.accepted}`", why, peers)
        yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
