"""Bounds of all fields of requests: their own, or those of short strings or of JSON."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
import pytest

from trioserve.http.api.openai.chat.schemas import ChatCompletionRequest
from trioserve.http.api.openai.completions.schemas import CompletionRequest
from trioserve.http.api.routes import ROUTES
from trioserve.http.api.schema.field_bounds import (
    MAX_JSON_CHARACTERS,
    MAX_JSON_DEPTH,
    MAX_JSON_VALUES,
    MAX_SHORT_CHARACTERS,
    bounds_of,
)
from trioserve.http.api.schema.reading import hint, only, parse_body, struct_classes
from trioserve.protocol.errors import InvalidRequest

REQUESTS = [type_ for route in ROUTES for type_ in (route.request, route.query) if type_]


def unbounded_fields(types_: Iterable[Any]) -> list[str]:
    """Return the fields that may hold a string, a list or JSON of any size."""
    return [
        f"{cls.__name__}.{name}"
        for cls in struct_classes(types_)
        for name, annotation in typing.get_type_hints(cls, include_extras=True).items()
        if name in cls.__struct_fields__
        and not is_bounded(annotation, any(each.name == name for each in bounds_of(cls)))
    ]


def is_bounded(annotation: Any, checked: bool, depth: int = 0) -> bool:
    """Return whether a value has a bound; ``checked`` if strings and JSON in it have that of all.

    A list counts if its items have one: ``check_body`` bounds how many there are.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        metas = [each for each in annotation.__metadata__ if isinstance(each, msgspec.Meta)]
        if any("only" in (meta.extra or ()) for meta in metas):
            return True
        own = any(meta.max_length is not None or meta.pattern is not None for meta in metas)
        inner = annotation.__origin__
        return (own and inner is str) or is_bounded(inner, checked, depth)
    if annotation in (str, Any):
        return checked
    if annotation in (int, float, bool, None, type(None), msgspec.UnsetType):
        return True
    if annotation is bytes:  # A form's file, which the body and --limit-mm-bytes bound.
        return True
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return depth <= 1  # A field or an item of its list, which parse_body looks into.
    if origin in (typing.Union, types.UnionType):
        return all(is_bounded(each, checked, depth) for each in arguments)
    if origin is list:
        return is_bounded(arguments[0], checked, depth + 1)
    if origin is dict:
        return (
            checked
            if arguments[1] is Any
            else all(is_bounded(each, checked, depth + 2) for each in arguments)
        )
    return origin is Literal


def test_every_field_of_every_request_has_a_bound() -> None:
    assert len(struct_classes(REQUESTS)) > 60
    assert unbounded_fields(REQUESTS) == []


def test_no_text_is_taken_for_a_short_string() -> None:
    texts = {"content", "description", "input", "instructions", "prompt", "system", "text"}
    short = [
        f"{cls.__name__}.{field.name}"
        for cls in struct_classes(REQUESTS)
        for field in bounds_of(cls)
        if field.short and field.name in texts
    ]
    assert short == []


class Inner(msgspec.Struct):
    """A planted one."""

    name: str


class Planted(msgspec.Struct, kw_only=True):
    """Fields that the rule doesn't reach."""

    pair: tuple[str, str]
    by_name: dict[str, Inner]
    lists: list[list[Inner]]
    fine: Inner | list[Inner] | str | None
    raw: msgspec.Raw


def test_a_field_without_a_bound_is_seen() -> None:
    assert unbounded_fields([Planted]) == [
        f"Planted.{n}" for n in ("pair", "by_name", "lists", "raw")
    ]


class Asked(msgspec.Struct, kw_only=True):
    """A request with a field of each kind."""

    name: str | list[str] | None = None
    marked: Annotated[str | None, msgspec.Meta(description="x")] = None
    table: dict[str, str] | None = None
    longer: Annotated[str, msgspec.Meta(max_length=5000)] | None = None
    free: Annotated[dict[str, Any] | None, msgspec.Meta(description="x")] = None
    several: list[dict[str, Any]] | None = None
    ignored: Annotated[Any, hint()] = None
    refused: Annotated[Any, only()] = None
    inner: list[Inner | str] | None = None


def nested(depth: int) -> Any:
    """Return a list in lists, of which there are ``depth``."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


SHORT = "x" * MAX_SHORT_CHARACTERS
LARGE = ["x" * 1000] * (MAX_JSON_CHARACTERS // 1000)
FITS: list[dict[str, Any]] = [
    {"name": SHORT, "marked": SHORT, "table": {SHORT: SHORT}},
    {"name": [SHORT, SHORT]},
    {"longer": "x" * 5000},
    {"free": {"a": LARGE}, "several": [{"a": LARGE}] * 3},
    {"free": {"a": nested(MAX_JSON_DEPTH - 1)}},
    {"ignored": nested(MAX_JSON_DEPTH)},
    {"free": {"a": [1] * (MAX_JSON_VALUES - 2)}},
    {"inner": ["x", {"name": SHORT}]},
]
TOO_MUCH: list[tuple[dict[str, Any], str, int]] = [
    ({"name": SHORT + "x"}, "name", MAX_SHORT_CHARACTERS),
    ({"name": [SHORT, SHORT + "x"]}, "name[1]", MAX_SHORT_CHARACTERS),
    ({"marked": SHORT + "x"}, "marked", MAX_SHORT_CHARACTERS),
    ({"table": {"a": SHORT + "x"}}, "table", MAX_SHORT_CHARACTERS),
    ({"table": {SHORT + "x": "a"}}, "table", MAX_SHORT_CHARACTERS),
    ({"longer": "x" * 5001}, "longer", 5000),
    ({"free": {"a": [*LARGE, "x" * 1000]}}, "free", MAX_JSON_CHARACTERS),
    ({"free": {"x" * MAX_JSON_CHARACTERS: "a"}}, "free", MAX_JSON_CHARACTERS),
    ({"several": [{}, {"a": [LARGE, LARGE]}]}, "several[1]", MAX_JSON_CHARACTERS),
    ({"ignored": "x" * (MAX_JSON_CHARACTERS + 1)}, "ignored", MAX_JSON_CHARACTERS),
    ({"ignored": [[1] * 70_000] * 2}, "ignored", MAX_JSON_VALUES),
    ({"free": {"a": nested(MAX_JSON_DEPTH)}}, "free", MAX_JSON_DEPTH),
    ({"ignored": nested(MAX_JSON_DEPTH + 1)}, "ignored", MAX_JSON_DEPTH),
    ({"inner": ["x", {"name": SHORT + "x"}]}, "inner[1].name", MAX_SHORT_CHARACTERS),
]


@pytest.mark.parametrize("body", FITS)
def test_what_fits_is_read(body: dict[str, Any]) -> None:
    request = parse_body(Asked, json.dumps(body).encode())
    kept = {name: value for name, value in body.items() if name not in ("ignored", "inner")}
    assert {name: getattr(request, name) for name in kept} == kept


@pytest.mark.parametrize(("body", "param", "most"), TOO_MUCH)
def test_what_is_too_much_is_refused(body: dict[str, Any], param: str, most: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{most}") as error:
        parse_body(Asked, json.dumps(body).encode())
    assert error.value.param == param
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("cls", [ChatCompletionRequest, CompletionRequest])
def test_what_is_ignored_is_not_kept(cls: type[msgspec.Struct]) -> None:
    body = (
        {"messages": [{"role": "user"}]} if "messages" in cls.__struct_fields__ else {"prompt": "x"}
    )
    request = parse_body(cls, json.dumps({**body, "user": "me", "metadata": {"a": 1}}).encode())
    assert (request.user, request.metadata) == (None, None)  # type: ignore[attr-defined]
