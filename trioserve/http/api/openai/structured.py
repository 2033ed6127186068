"""One grammar from all fields that give the form of an output.

OpenAI has ``response_format``, vLLM ``structured_outputs`` (in older versions ``guided_json`` and
others like it), SGLang ``json_schema``, ``regex`` and ``ebnf``. A request may use one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from trioserve.http.api.openai.structured_schemas import (
    JsonSchema,
    JsonSchemaFormat,
    JsonText,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormat,
)
from trioserve.http.api.schema.decoding_errors import as_invalid_request
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.structural_tags import check_format

MAX_SCHEMA_DEPTH = 100
"""Deepest nesting of a schema in which objects can be closed."""


@attrs.frozen
class GrammarField:
    """A grammar, and the name of its field."""

    name: str
    grammar: Grammar


def grammar_field(
    *,
    response_format: ResponseFormat | None = None,
    structured_outputs: StructuredOutputs | None = None,
    guided_whitespace_pattern: str | None = None,
    **rules: Any,
) -> GrammarField | None:
    """Return the grammar of a request, with its field; None if any text is allowed.

    ``rules`` are the fields that hold a rule by themselves: ``json_schema``, ``regex``, ``ebnf``
    and ``structural_tag`` (SGLang), ``guided_json``, ``guided_regex``, ``guided_choice``,
    ``guided_grammar`` and ``guided_json_object`` (vLLM).

    Raises:
        InvalidRequest: there are two, or one is invalid or too large; ``param`` names it.
    """
    asked: list[_Asked] = []
    if response_format is not None and not isinstance(response_format, TextFormat):
        asked.append(_Asked("response_format", _response_format, response_format))
    if structured_outputs is not None:
        asked.extend(_structured(structured_outputs))
    options = _Options(whitespace_pattern=guided_whitespace_pattern)
    asked.extend(
        _Asked(name, _READERS[name], value, options)
        for name, value in rules.items()
        if value is not None and value is not False
    )
    if len(asked) > 1:
        first, second = asked[0].name, asked[1].name
        raise InvalidRequest(
            f"{first} and {second} both say what the output is to look like: give one of them",
            param=second,
        )
    if guided_whitespace_pattern is not None and not (
        asked and asked[0].name.startswith("guided_json")
    ):
        raise _needs_json("guided_whitespace_pattern")
    return asked[0].read() if asked else None


@attrs.frozen
class _Options:
    """Options of JSON, by the names of ``structured_outputs``."""

    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


@attrs.frozen
class _Asked:
    """A field that holds a rule. ``reader`` takes the field's name, its value and the options."""

    name: str
    reader: Callable[[str, Any, _Options], Grammar]
    value: Any
    options: _Options = attrs.field(factory=_Options)

    def read(self) -> GrammarField:
        try:
            return GrammarField(self.name, self.reader(self.name, self.value, self.options))
        except InvalidRequest as error:
            if error.param != "grammar":
                raise
            message = str(error).replace("grammar", self.name, 1)
            raise InvalidRequest(message, param=self.name) from None


def _structured(given: StructuredOutputs) -> list[_Asked]:
    """Return the rules of ``structured_outputs`` that are given."""
    options = _Options(
        disable_any_whitespace=given.disable_any_whitespace,
        whitespace_pattern=given.whitespace_pattern,
        disable_additional_properties=given.disable_additional_properties,
    )
    names = [
        name
        for name in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        if getattr(given, name) not in (None, False)
    ]
    if not names:
        raise InvalidRequest(
            "structured_outputs.json_object must be true where it is all that is given",
            param="structured_outputs.json_object",
        )
    for option, value in attrs.asdict(options).items():
        if value and not {"json", "json_object"}.intersection(names):
            raise _needs_json(f"structured_outputs.{option}")
    return [
        _Asked(f"structured_outputs.{name}", _READERS[name], getattr(given, name), options)
        for name in names
    ]


def _needs_json(option: str) -> InvalidRequest:
    return InvalidRequest(f"{option} is an option of JSON, which isn't asked for", param=option)


def _response_format(name: str, given: ResponseFormat, options: _Options) -> Grammar:
    if isinstance(given, JsonSchemaFormat):
        return _named_schema(f"{name}.json_schema", given.json_schema)
    if isinstance(given, StructuralTagFormat):
        return _structural_tag(name, given)
    return _json_object(name, True, options)


def _named_schema(name: str, given: JsonSchema) -> Grammar:
    if given.schema is not None and given.json_schema is not None:
        raise InvalidRequest(
            f"{name}.schema and {name}.json_schema are the same: give one of them",
            param=f"{name}.json_schema",
        )
    schema = given.schema if given.schema is not None else given.json_schema
    if schema is None:
        raise InvalidRequest(f"{name}.schema is missing", param=f"{name}.schema")
    return Grammar("json_schema", _json_text(schema))


def _json_schema(name: str, value: JsonText, options: _Options) -> Grammar:
    return Grammar("json_schema", _json_text(_with_options(_as_object(name, value), options)))


def _json_object(name: str, value: bool, options: _Options) -> Grammar:
    return _json_schema(name, {"type": "object"}, options)


def _regex(name: str, value: str, options: _Options) -> Grammar:
    return Grammar("regex", value)


def _grammar(name: str, value: str, options: _Options) -> Grammar:
    return Grammar("grammar", value)


def _choice(name: str, value: list[str], options: _Options) -> Grammar:
    return Grammar("choice", _json_text(value))


def _tag(name: str, value: JsonText, options: _Options) -> Grammar:
    given = {"type": "structural_tag", **_as_object(name, value)}
    try:
        tag = msgspec.convert(given, StructuralTagFormat)
    except msgspec.ValidationError as error:
        wrong = as_invalid_request(str(error), StructuralTagFormat, msgspec.json.encode(given))
        raise InvalidRequest(
            f"{name}.{wrong}", param=f"{name}.{wrong.param}", code=wrong.code
        ) from None
    return _structural_tag(name, tag)


def _structural_tag(name: str, given: StructuralTagFormat) -> Grammar:
    if given.format is not None:
        return _by_format(name, given)
    for field in ("structures", "triggers"):
        if not getattr(given, field):
            raise InvalidRequest(f"{name}.{field} must hold at least one", param=f"{name}.{field}")
    structures = [
        {"begin": each.begin, "schema": {} if each.schema is None else each.schema, "end": each.end}
        for each in given.structures or ()
    ]
    return Grammar(
        "structural_tag", _json_text({"structures": structures, "triggers": given.triggers})
    )


def _by_format(name: str, given: StructuralTagFormat) -> Grammar:
    if given.structures or given.triggers:
        raise InvalidRequest(
            f"{name}.format excludes structures and triggers", param=f"{name}.format"
        )
    grammar = Grammar("structural_tag", _json_text({"format": given.format}))
    try:
        check_format(given.format)
    except InvalidRequest as error:
        message = str(error).removeprefix("grammar: ")
        raise InvalidRequest(f"{name}.{message}", param=f"{name}.format") from error
    except RecursionError:
        raise InvalidRequest(
            f"{name}.format is nested too deeply", param=f"{name}.format"
        ) from None
    return grammar


_READERS: dict[str, Callable[[str, Any, _Options], Grammar]] = {
    "json": _json_schema,
    "json_schema": _json_schema,
    "guided_json": _json_schema,
    "json_object": _json_object,
    "guided_json_object": _json_object,
    "regex": _regex,
    "guided_regex": _regex,
    "grammar": _grammar,
    "ebnf": _grammar,
    "guided_grammar": _grammar,
    "choice": _choice,
    "guided_choice": _choice,
    "structural_tag": _tag,
}


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _as_object(name: str, value: JsonText) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"{name} is no JSON object: {error}", param=name) from None


def _with_options(schema: dict[str, Any], options: _Options) -> dict[str, Any]:
    """Return ``schema`` with the settings of llguidance that ``options`` ask for."""
    guidance: dict[str, Any] = {}
    if options.disable_any_whitespace:
        guidance["whitespace_flexible"] = False
    if options.whitespace_pattern is not None:
        if guidance:
            raise InvalidRequest(
                "disable_any_whitespace and whitespace_pattern exclude each other",
                param="structured_outputs.whitespace_pattern",
            )
        guidance["whitespace_pattern"] = options.whitespace_pattern
    if options.disable_additional_properties:
        schema = _closed(schema, 0)
    if guidance:
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **guidance}}
    return schema


_SCHEMA_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_SCHEMAS = frozenset(
    {"allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "contains"}
    | {"additionalProperties", "then", "else"}
)


def _closed(schema: Any, depth: int) -> Any:
    """Return ``schema`` with every object that has properties closed to others, as in vLLM."""
    if depth > MAX_SCHEMA_DEPTH:
        raise InvalidRequest(
            f"disable_additional_properties is served for schemas of at most {MAX_SCHEMA_DEPTH} "
            "levels",
            param="structured_outputs.disable_additional_properties",
        )
    if isinstance(schema, list):
        return [_closed(item, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            closed[key] = {name: _closed(each, depth + 1) for name, each in value.items()}
        elif key in _SCHEMAS:
            closed[key] = _closed(value, depth + 1)
        else:
            closed[key] = value
    if {"properties", "patternProperties"} & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed
