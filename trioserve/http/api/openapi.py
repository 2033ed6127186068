"""The OpenAPI 3.1 document, made from the routes and their classes."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from trioserve.http.api.auth import OPEN_PATHS
from trioserve.http.api.dialects import error_body
from trioserve.http.api.errors import ERROR_STATUSES
from trioserve.http.api.route import Route
from trioserve.http.api.schema.field_bounds import MAX_SHORT_CHARACTERS, bounds_of
from trioserve.http.api.schema.forms import FILE, FORM_TYPE
from trioserve.http.api.schema.reading import (
    TOKEN_ID_FORMAT,
    Exclusive,
    exclusive_fields,
    struct_classes,
    usual_types,
)
from trioserve.protocol.version import __version__

_PARAMETER_PATTERN = re.compile(r"<(?:\w+:)?(\w+)>")
_BODY_ERRORS = (400, 408, 413, 415)


def _header(kind: str, description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_ID_HEADER = {"X-Request-Id": _header("string", "The id that the client sent, or a new one")}
_RETRY_HEADER = {"Retry-After": _header("integer", "Seconds to wait before trying again")}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": _header("string", "Bearer")},
    429: _RETRY_HEADER,
}


@attrs.frozen
class _References:
    """References of the document to each type."""

    _pairs: list[tuple[Any, Any]]

    def of(self, type_: Any) -> Any:
        return next(schema for known, schema in self._pairs if known == type_)


def openapi_path(rule: str) -> str:
    """Return the path of a rule: ``/v1/models/<path:name>`` becomes ``/v1/models/{name}``."""
    return _PARAMETER_PATTERN.sub(r"{\1}", rule)


def error_statuses(route: Route, path: str) -> list[int]:
    """Return every status of an error that ``route`` can answer with at ``path``."""
    statuses = {500, *route.errors}
    if path not in OPEN_PATHS:
        statuses.update((401, 429))
    if route.control:
        statuses.add(403)
    if route.request is not None:
        statuses.update(_BODY_ERRORS)
    return sorted(statuses)


def build_document(
    routes: Sequence[Route], *, root_path: str = "", vocab_size: int | None = None
) -> dict[str, Any]:
    """Return the document as JSON values; token ids are below ``vocab_size``."""
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    for cls in struct_classes(types):
        _add_exclusive(components[cls.__name__], exclusive_fields(cls))
        _add_usual_types(components, cls)
    for cls in struct_classes(
        [type_ for route in routes for type_ in (route.request, route.query)]
    ):
        for field in bounds_of(cls):
            if field.short:
                _add_length(components[cls.__name__]["properties"][field.encoded_name])
    for route in routes:
        if route.is_form and route.request is not None:
            _mark_file(components[route.request.__name__]["properties"][FILE])
    if vocab_size is not None:
        _bound_token_ids(components, vocab_size - 1)
    references = _References(list(zip(types, schemas, strict=True)))
    paths: dict[str, Any] = {}
    taken: set[str] = set()
    for route in routes:
        for rule in route.rules:
            operation = _operation(route, rule, references, components)
            operation["operationId"] = _operation_id(route, rule, taken)
            paths.setdefault(openapi_path(rule), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioserve", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation_id(route: Route, rule: str, taken: set[str]) -> str:
    """Return the handler's name, or one made of method and path if a handler has several."""
    id = route.handler
    if id in taken:
        id = route.method.lower() + re.sub(r"\W+", "_", openapi_path(rule)).rstrip("_")
    taken.add(id)
    return id


def _types(routes: Sequence[Route]) -> list[Any]:
    types: list[Any] = []
    for route in routes:
        error = error_body(route.rule)
        types_of_route = (route.request, route.query, route.response, route.events, route.unwell)
        for type_ in (error, *types_of_route):
            if type_ is not None and not isinstance(type_, str) and type_ not in types:
                types.append(type_)
    return types


def _add_length(schema: dict[str, Any]) -> None:
    """Add the maximal length of the strings in a field, if its type doesn't give it."""
    if schema.get("type") == "string" and "enum" not in schema:
        schema.setdefault("maxLength", MAX_SHORT_CHARACTERS)
    for inner in (*schema.get("anyOf", ()), schema.get("items")):
        if isinstance(inner, dict):
            _add_length(inner)


def _mark_file(schema: dict[str, Any]) -> None:
    """Make a field of bytes, which JSON would have in base64, that of a form's file."""
    schema.pop("contentEncoding", None)
    schema["format"] = "binary"


def _bound_token_ids(value: Any, largest: int) -> None:
    """Add the largest token id to every schema of a token id."""
    if isinstance(value, dict):
        if value.get("format") == TOKEN_ID_FORMAT:
            value["maximum"] = largest
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _bound_token_ids(item, largest)


def _add_exclusive(component: dict[str, Any], groups: Sequence[Exclusive]) -> None:
    """Add the groups of fields that exclude each other to a class's schema.

    Two names of one thing are described in words alone: with a rule for each such pair, a tool that
    makes requests out of the schema has to try every combination of them.
    """
    for group in groups:
        for name in group.names:
            others = ", ".join(f"`{other}`" for other in group.names if other != name)
            field = component["properties"][name]
            field["description"] = f"{field.get('description', '')} Excludes {others}.".strip()
        if group.required or len(group.names) > 2:
            component.setdefault("allOf", []).append(
                {"anyOf": [_only_one(name, group) for name in group.names]}
            )


def _add_usual_types(components: dict[str, Any], cls: type[msgspec.Struct]) -> None:
    """Mark the items of a class's lists that may leave out their ``type``."""
    for name, type_ in usual_types(cls).items():
        _drop_discriminators(components[cls.__name__]["properties"][name])
        for item in struct_classes([typing.get_type_hints(cls)[name]]):
            if item.__struct_config__.tag == type_:
                # Another class may have a list of the same items.
                required = components[item.__name__]["required"]
                if item.__struct_config__.tag_field in required:
                    required.remove(item.__struct_config__.tag_field)


def _drop_discriminators(value: Any) -> None:
    """Drop the discriminators of classes in lists that may leave out the field."""
    if isinstance(value, dict):
        value.pop("discriminator", None)
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _drop_discriminators(item)


def _only_one(name: str, group: Exclusive) -> dict[str, Any]:
    """Return the schema of an object that gives at most ``name`` of the group's fields."""
    others = {other: {"type": "null"} for other in group.names if other != name}
    if not group.required:
        return {"properties": others}
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}, **others}}


def _operation(
    route: Route, rule: str, references: _References, components: dict[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "tags": [route.group],
        "responses": _responses(route, rule, references),
    }
    if rule not in OPEN_PATHS:
        operation["security"] = [{"key": []}] if route.control else [{}, {"key": []}]
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in _PARAMETER_PATTERN.findall(rule)
    ]
    parameters += _query_parameters(route.query, components)
    if parameters:
        operation["parameters"] = parameters
    if route.request is not None:
        kind = FORM_TYPE if route.is_form else "application/json"
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": {kind: {"schema": references.of(route.request)}},
        }
    return operation


def _query_parameters(
    query: type[msgspec.Struct] | None, components: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the parameters of an operation's query; none of them can be null."""
    if query is None:
        return []
    schemas = components[query.__name__]["properties"]
    parameters = []
    for name in schemas:
        schema = _without_null(schemas[name])
        if schema.get("enum") != []:  # Only null would be served.
            parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    return parameters


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    if "enum" in rest:
        rest["enum"] = [value for value in rest["enum"] if value is not None]
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    if len(kinds) == 1:
        return {**rest, **kinds[0]}
    return {**rest, "anyOf": kinds} if kinds else rest


def _responses(route: Route, rule: str, references: _References) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {
            "description": "Done",
            "headers": dict(_ID_HEADER),
            "content": _content(route, references),
        }
    }
    error = {"application/json": {"schema": references.of(error_body(rule))}}
    for status in error_statuses(route, rule):
        responses[str(status)] = {
            "description": ERROR_STATUSES[status],
            "headers": {**_ID_HEADER, **_ERROR_HEADERS.get(status, {})},
            "content": error,
        }
    if route.unwell is not None:
        responses["503"] = {
            "description": "The server isn't well",
            "headers": dict(_ID_HEADER),
            "content": {"application/json": {"schema": references.of(route.unwell)}},
        }
    return responses


def _content(route: Route, references: _References) -> dict[str, Any]:
    if isinstance(route.response, str):
        kind = "object" if route.response == "application/json" else "string"
        return {route.response: {"schema": {"type": kind}}}
    server_api = references.of(route.response)
    if route.batch:
        server_api = {"anyOf": [server_api, {"type": "array", "items": server_api}]}
    content = {"application/json": {"schema": server_api}}
    content |= {kind: {"schema": {"type": "string"}} for kind in route.texts}
    if route.events is not None:
        content[route.stream_type] = {"schema": _event(route, references)}
    return content


def _event(route: Route, references: _References) -> dict[str, Any]:
    """Return the schema of one event. Its data is JSON, except that of the last one. A line is
    JSON.
    """
    schemas = [references.of(route.events), references.of(error_body(route.rule))]
    if route.stream_type != "text/event-stream":
        return {"anyOf": schemas, "description": "A line"}
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": schemas},
    }
    return {
        "type": "object",
        "description": "A server-sent event",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }
