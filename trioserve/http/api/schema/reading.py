"""Parsing of request bodies: typed, strict, and with errors in the client's own words.

A request class lists every field it knows. A known field that isn't served is listed, too, marked
with :func:`only` and the values that ask for nothing. Any other value is refused by name, and so is
a field that the class doesn't list. Nothing that a client sends is silently ignored. An operator
may have fields ignored with a line in the log: :mod:`trioserve.http.api.schema.ignored_fields`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, cast

import attrs
import msgspec

from trioserve.http.api.bounds import check_body
from trioserve.http.api.schema.decoding_errors import MAX_REREAD_BYTES, as_invalid_request
from trioserve.http.api.schema.field_bounds import bounds_of, check_fields
from trioserve.http.api.schema.ignored_fields import MAX_IGNORED, IgnoredFields, without_field
from trioserve.http.api.schema.refused_fields import Refusal
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import MAX_GRAMMAR_CHARACTERS
from trioserve.protocol.sampling import MAX_SEED, MAX_SEQUENCES

_INT32_MAX = 2**31 - 1

TOKEN_ID_FORMAT = "token-id"
"""Format of token ids in a schema; the largest id depends on the served model."""

# The ranges are those of trioserve.protocol.sampling and checks, so that the schema contains them.
Count = Annotated[int, msgspec.Meta(ge=0, le=_INT32_MAX)]
TokenId = Annotated[
    int, msgspec.Meta(ge=0, le=_INT32_MAX, extra_json_schema={"format": TOKEN_ID_FORMAT})
]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Salt = Annotated[str, msgspec.Meta(min_length=1)]
"""A cache salt, never empty: an empty one would share cached prompts with unsalted requests."""
NumOutputs = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)]
GrammarText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=MAX_SEED)]
Priority = Annotated[int, msgspec.Meta(ge=-_INT32_MAX, le=_INT32_MAX)]
IGNORABLE = ("unknown_parameter", "unsupported_parameter")
"""Codes of errors about fields that may be ignored."""
_WHOLE_FLOAT = ", got `float`"

RequestType = TypeVar("RequestType", bound=msgspec.Struct)


@attrs.frozen
class Exclusive:
    """Group of fields of a class: at most one may be given, or exactly one if it is required.

    A request class lists its groups in ``EXCLUSIVE``; :func:`parse_body` and ``/openapi.json`` use
    them.
    """

    names: tuple[str, ...]
    required: bool = False


def exclusive_fields(request_type: type[msgspec.Struct]) -> tuple[Exclusive, ...]:
    """Return the groups of fields of a request class that exclude each other."""
    return getattr(request_type, "EXCLUSIVE", ())


def usual_types(request_type: type[msgspec.Struct]) -> Mapping[str, str]:
    """Return the default ``type`` of items in lists that may leave it out, by the field's name.

    A request class lists them in ``USUAL_TYPES``; :func:`parse_body` and ``/openapi.json`` use
    them.
    """
    return getattr(request_type, "USUAL_TYPES", {})


def struct_classes(types: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """Return the classes in ``types`` and the classes that these name, in the order found."""
    found: list[type[msgspec.Struct]] = []
    stack = list(types)[::-1]
    while stack:
        type_ = stack.pop()
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            if type_ not in found:
                found.append(type_)
                stack += list(typing.get_type_hints(type_, include_extras=True).values())[::-1]
        else:
            stack += typing.get_args(type_)[::-1]
    return found


def about(text: str) -> msgspec.Meta:
    """Return metadata that describes a field, for ``/openapi.json`` and the documentation."""
    return msgspec.Meta(description=text)


def only(*values: Any, refusal: Refusal | None = None) -> msgspec.Meta:
    """Mark a field that is known but not served; null and ``values`` ask for nothing.

    The reason goes into the error and the documentation.
    """
    why = "" if refusal is None else refusal.value
    accepted = (None, *values)
    return msgspec.Meta(
        description="Known, but only these values are served" + (f": {why}." if why else "."),
        # The text keeps 1, 1.0 and True apart: typing has one annotation for equal metadata.
        extra={"only": accepted, "shown": _shown(accepted), "why": why, "refusal": refusal},
        extra_json_schema={"enum": list(accepted)},
    )


def _shown(values: tuple[Any, ...]) -> str:
    return " or ".join(msgspec.json.encode(value).decode() for value in values)


def one_worker() -> msgspec.Meta:
    """Mark a field of servers that compute a prompt in one worker and its output in another."""
    return only(refusal=Refusal.DISAGGREGATION)


def hint() -> msgspec.Meta:
    """Mark a field that accepts every value, because it asks nothing of the output."""
    return msgspec.Meta(
        description="Accepted; it has no influence on the output.", extra={"ignored": True}
    )


def one_or_several(given: Sequence[int | list[int]], name: str) -> tuple[list[list[int]], bool]:
    """Return the lists in a field that holds ids or lists of ids, and whether it holds several.

    Raises:
        InvalidRequest: ``given`` mixes the two.
    """
    kinds = set(map(type, given))
    if kinds == {list}:
        return cast(list[list[int]], list(given)), True
    if list in kinds:
        raise InvalidRequest(f"{name} is a list of token ids, or a list of such lists", param=name)
    return [cast(list[int], list(given))], False


def parse_body(
    request_type: type[RequestType], body: bytes, ignored: IgnoredFields | None = None
) -> RequestType:
    """Return the request in ``body``, a JSON object.

    Args:
        request_type: its class.
        body: the bytes that were sent.
        ignored: collects the names of unserved fields, if these are ignored.

    Raises:
        InvalidRequest: it isn't one; ``param`` names the field if there is one to name.
    """
    check_body(body)
    try:
        return _parse_strictly(request_type, body)
    except InvalidRequest as error:
        if ignored is None or error.code not in IGNORABLE or len(body) > MAX_REREAD_BYTES:
            raise
        return _parse_ignoring(request_type, msgspec.json.decode(body), error, ignored)


def _parse_ignoring(
    request_type: type[RequestType], value: Any, error: InvalidRequest, ignored: IgnoredFields
) -> RequestType:
    """Parse a request without the field that ``error`` is about, and without further ones."""
    for _ in range(MAX_IGNORED):
        if error.param is None or not without_field(value, error.param):
            break
        ignored.note(error.param)
        try:
            return _parse_strictly(request_type, msgspec.json.encode(value))
        except InvalidRequest as next_error:
            if next_error.code not in IGNORABLE:
                raise
            error = next_error
    raise error


def _parse_strictly(request_type: type[RequestType], body: bytes) -> RequestType:
    try:
        request = _decode(request_type, body)
    except msgspec.ValidationError as error:
        raise as_invalid_request(str(error), request_type, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body isn't valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    _check_values(request, "")
    for name in _ignored_fields(request_type):
        setattr(request, name, None)  # It isn't kept for as long as the request is open.
    return request


def parse_query(query_type: type[RequestType], pairs: Iterable[tuple[str, str]]) -> RequestType:
    """Return the query with these names and values; a list has a pair for each item.

    Raises:
        InvalidRequest: it isn't of that type; ``param`` names the field.
    """
    lists = _list_fields(query_type)
    given: dict[str, Any] = {}
    for name, value in pairs:
        plain = name.removesuffix("[]")  # The name that OpenAI's clients use for items of a list.
        if plain in lists:
            given.setdefault(plain, []).append(value)
        else:
            given[name] = value
    try:
        query = msgspec.convert(given, query_type, strict=False)
    except msgspec.ValidationError as error:
        body = msgspec.json.encode(given)
        raise as_invalid_request(str(error), query_type, body) from None
    _check_values(query, "")
    return query


def _decode(request_type: type[RequestType], body: bytes) -> RequestType:
    usual = usual_types(request_type)
    try:
        request: RequestType = _decoder(request_type).decode(body)
        return request
    except msgspec.ValidationError as error:
        if not usual and not _is_whole_float(error, body):
            raise
    value = _with_usual_types(msgspec.json.decode(body), usual)
    try:
        return msgspec.convert(value, type=request_type)
    except msgspec.ValidationError as error:
        if not _is_whole_float(error, body):
            raise
    # JSON has one kind of number, and so has JSON Schema: 5.0 is as good an integer as 5.
    return msgspec.convert(_with_whole_numbers(value), type=request_type)


def _is_whole_float(error: msgspec.ValidationError, body: bytes) -> bool:
    """Return whether ``error`` may be about a whole float in a ``body`` short enough to search."""
    return _WHOLE_FLOAT in str(error) and len(body) <= MAX_REREAD_BYTES


def _with_usual_types(value: Any, usual: Mapping[str, str]) -> Any:
    """Return ``value`` with a ``type`` in the items of those lists that have none."""
    for name, type_ in usual.items():
        items = value.get(name) if isinstance(value, dict) else None
        if isinstance(items, list):
            value[name] = [
                {"type": type_, **item} if isinstance(item, dict) else item for item in items
            ]
    return value


def _with_whole_numbers(value: Any) -> Any:
    """Return ``value`` with whole floats as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(item) for name, item in value.items()}
    return value


@functools.cache
def _decoder(request_type: type[RequestType]) -> msgspec.json.Decoder[RequestType]:
    return msgspec.json.Decoder(request_type)


def _check_values(value: msgspec.Struct, path: str) -> None:
    """Refuse exclusive, unserved and oversized values in a request and in its objects.

    Only objects that are a whole field, or an item of a field's list, are checked.
    """
    for group in exclusive_fields(type(value)):
        _check_exclusive(value, group, path)
    for name, unserved in _unserved_fields(type(value)):
        given = getattr(value, name)
        if given is None:  # Null always asks for nothing.
            continue
        if not any(_same(given, neutral) for neutral in unserved["only"]):
            encoded = type(value).__struct_encode_fields__[
                type(value).__struct_fields__.index(name)
            ]
            raise _not_served(path + encoded, unserved)
    check_fields(value, path)
    for name in _holding_fields(type(value)):
        held = getattr(value, name)
        if isinstance(held, msgspec.Struct):
            _check_values(held, f"{path}{name}.")
        elif isinstance(held, list):
            for index, item in enumerate(held):
                if isinstance(item, msgspec.Struct) and _is_checked(type(item)):
                    _check_values(item, f"{path}{name}[{index}].")


def _check_exclusive(value: Any, group: Exclusive, path: str) -> None:
    given = [name for name in group.names if getattr(value, name) is not None]
    if len(given) > 1 or (group.required and not given):
        number = "exactly one" if group.required else "at most one"
        raise InvalidRequest(
            f"give {number} of {', '.join(path + name for name in group.names)}",
            param=path + (given[-1] if given else group.names[0]),
        )


@functools.cache
def _is_checked(type_: type[msgspec.Struct]) -> bool:
    """Return whether there is anything to check in objects of that class."""
    return bool(
        exclusive_fields(type_)
        or _unserved_fields(type_)
        or bounds_of(type_)
        or _holding_fields(type_)
    )


@functools.cache
def _unserved_fields(request_type: type[msgspec.Struct]) -> list[tuple[str, dict[str, Any]]]:
    """Return every field marked with :func:`only`, with its mark."""
    return [(name, extra) for name, extra in _marks(request_type) if "only" in extra]


@functools.cache
def _ignored_fields(request_type: type[msgspec.Struct]) -> list[str]:
    """Return the fields marked with :func:`hint`."""
    return [name for name, extra in _marks(request_type) if "ignored" in extra]


def _marks(request_type: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the marked fields of a class, with their marks."""
    hints = typing.get_type_hints(request_type, include_extras=True)
    for name, annotation in hints.items():
        for meta in getattr(annotation, "__metadata__", ()):
            if isinstance(meta, msgspec.Meta) and meta.extra:
                yield name, meta.extra


@functools.cache
def _holding_fields(request_type: type[msgspec.Struct]) -> list[str]:
    """Return the fields that may hold an object of another class, or several."""
    hints = typing.get_type_hints(request_type)
    return [name for name in request_type.__struct_fields__ if _names_struct(hints[name])]


def _list_fields(query_type: type[msgspec.Struct]) -> set[str]:
    """Return the fields that are lists."""
    hints = typing.get_type_hints(query_type)
    return {
        name
        for name, hint in hints.items()
        if any(typing.get_origin(each) is list for each in typing.get_args(hint))
    }


def _names_struct(hint: Any) -> bool:
    arguments = typing.get_args(hint)
    if arguments:
        return any(map(_names_struct, arguments))
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) or isinstance(neutral, bool):
        return value is neutral
    return bool(value == neutral)


def _not_served(name: str, unserved: dict[str, Any]) -> InvalidRequest:
    why = f" ({unserved['why']})" if unserved["why"] else ""
    return InvalidRequest(
        f"{name} isn't served{why}: leave it out or give {unserved['shown']}",
        param=name,
        code="unsupported_parameter",
    )
