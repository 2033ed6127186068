"""The OpenAPI 3.1 document, made from the routes and the classes that they name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

import trioserve
from trioserve.http.auth import OPEN_PATHS
from trioserve.http.errors import ErrorResponse
from trioserve.http.routes import Route

__all__ = ["build_document", "openapi_path"]

_PARAMETER_PATTERN = re.compile(r"<(?:\w+:)?(\w+)>")


def openapi_path(rule: str) -> str:
    """``/v1/models/<path:name>`` as ``/v1/models/{name}``."""
    return _PARAMETER_PATTERN.sub(r"{\1}", rule)


def build_document(routes: Sequence[Route], *, root_path: str = "") -> dict[str, Any]:
    """The document, as JSON values."""
    classes = _classes(routes)
    schemas, components = msgspec.json.schema_components(
        classes, ref_template="#/components/schemas/{name}"
    )
    references = dict(zip(classes, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        operations = paths.setdefault(openapi_path(route.rule), {})
        operations[route.method.lower()] = _operation(route, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioserve", "version": trioserve.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _classes(routes: Sequence[Route]) -> list[type[msgspec.Struct]]:
    classes: list[type[msgspec.Struct]] = [ErrorResponse]
    for route in routes:
        for cls in (route.request, route.response, route.events):
            if isinstance(cls, type) and cls not in classes:
                classes.append(cls)
    return classes


def _operation(route: Route, references: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "responses": {
            "200": {"description": "Done", "content": _content(route, references)},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": references[ErrorResponse]}},
            },
        },
    }
    if route.rule not in OPEN_PATHS:
        operation["security"] = [{}, {"key": []}]
    names = _PARAMETER_PATTERN.findall(route.rule)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": references[route.request]}},
        }
    return operation


def _content(route: Route, references: dict[type[msgspec.Struct], Any]) -> dict[str, Any]:
    if isinstance(route.response, str):
        return {route.response: {}}
    whole = references[route.response]
    if route.batch:
        whole = {"anyOf": [whole, {"type": "array", "items": whole}]}
    content = {"application/json": {"schema": whole}}
    if route.events is not None:
        content["text/event-stream"] = {"schema": references[route.events]}
    return content
