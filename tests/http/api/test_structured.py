"""Every field that says how an output is to look like becomes the grammar that it means."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from trioserve.http.api.openai.structured import grammar_field
from trioserve.http.api.openai.structured_schemas import ResponseFormat, StructuredOutputs
from trioserve.http.api.schema.field_bounds import Text
from trioserve.http.api.schema.reading import parse_body
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import MAX_GRAMMAR_CHARACTERS, Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
FORMAT = {
    "type": "sequence",
    "elements": [{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}],
}
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields by themselves, to be read as a request's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_whitespace_pattern: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: Text | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


def grammar_of(**given: Any) -> Grammar | None:
    found = grammar_field(**given)
    return None if found is None else found.grammar


def fields(**given: Any) -> dict[str, Any]:
    """Return the fields as a request with them has them."""
    return msgspec.structs.asdict(parse_body(Body, json.dumps(given).encode()))


def json_format(**given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": given}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": json_format(name="x", schema=SCHEMA, strict=True)},
            "json_schema",
            SCHEMA_TEXT,
        ),
        ({"response_format": json_format(json_schema=SCHEMA)}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, "choice", '["yes","n\\"o"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"guided_json_object": True}, "json_schema", '{"type":"object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "choice", '["a"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA_TEXT),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        (
            {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}},
            "regex",
            "a",
        ),
    ],
)
def test_what_is_asked_for(given: dict[str, Any], kind: str, text: str) -> None:
    assert grammar_of(**fields(**given)) == Grammar(kind, text)


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "structural_tag", **TAGS}},
        {"structured_outputs": {"structural_tag": TAGS}},
        {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAGS})}},
        {"structural_tag": json.dumps(TAGS)},
    ],
)
def test_structural_tags(given: dict[str, Any]) -> None:
    grammar = grammar_of(**fields(**given))
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    assert json.loads(grammar.text) == TAGS


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "structural_tag", "format": FORMAT}},
        {"structured_outputs": {"structural_tag": {"format": FORMAT}}},
        {"structural_tag": json.dumps({"type": "structural_tag", "format": FORMAT})},
    ],
)
def test_structural_tags_by_format(given: dict[str, Any]) -> None:
    grammar = grammar_of(**fields(**given))
    assert grammar is not None
    assert grammar.kind == "structural_tag"
    assert json.loads(grammar.text) == {"format": FORMAT}


@pytest.mark.parametrize(
    "given", [{}, {"response_format": {"type": "text"}}, {"guided_json_object": False}]
)
def test_any_text(given: dict[str, Any]) -> None:
    assert grammar_of(**fields(**given)) is None


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf", "regex and ebnf both say"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "response_format and structured_outputs.regex both say",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "choice": ["a"]}},
            "structured_outputs.choice",
            "give exactly one of structured_outputs.json, structured_outputs.json_object,",
        ),
        ({"structured_outputs": {}}, "structured_outputs.json", "give exactly one of"),
        (
            {"structured_outputs": {"json_object": False}},
            "structured_outputs.json_object",
            "structured_outputs.json_object must be true where it is all that is given",
        ),
        (
            {"structured_outputs": {"choice": []}},
            "structured_outputs.choice",
            "structured_outputs.choice: expected array of length >= 1",
        ),
        (
            {"structured_outputs": {"json": "{"}},
            "structured_outputs.json",
            "structured_outputs.json is no JSON object",
        ),
        ({"json_schema": "[1]"}, "json_schema", "json_schema is no JSON object"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "length >= 1"),
        ({"regex": ""}, "regex", "regex must be a text that isn't empty"),
        (
            {"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)},
            "guided_regex",
            f"guided_regex must be at most {MAX_GRAMMAR_CHARACTERS} characters long",
        ),
        (
            {"response_format": json_format(name="x")},
            "response_format.json_schema.schema",
            "response_format.json_schema.schema is missing",
        ),
        (
            {"response_format": json_format(schema={}, json_schema={})},
            "response_format.json_schema.json_schema",
            "are the same",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            "response_format.schema",
            "is not a field",
        ),
        (
            {"response_format": {"type": "structural_tag", "triggers": ["a"]}},
            "response_format.structures",
            "must hold at least one",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "response_format.format",
            "response_format.format.type: one of const_string, json_schema,",
        ),
        (
            {"structural_tag": '{"format": {"type": "or", "elements": [{"type": "tag"}]}}'},
            "structural_tag.format",
            "structural_tag.format.elements[0].begin: it must be a string",
        ),
        (
            {"structural_tag": '{"format": {"type": "any_text"}, "triggers": ["a"]}'},
            "structural_tag.format",
            "excludes structures and triggers",
        ),
        (
            {"structural_tag": '{"triggers": 1}'},
            "structural_tag.triggers",
            "structural_tag.triggers: expected array or null, got int",
        ),
        (
            {"structured_outputs": {"structural_tag": {"structures": [{"begin": 5, "end": ""}]}}},
            "structured_outputs.structural_tag.structures[0].begin",
            "structured_outputs.structural_tag.structures[0].begin: expected str, got int",
        ),
        ({"structural_tag": '{"trigger": []}'}, "structural_tag.trigger", "is not a field"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "is an option of JSON",
        ),
        (
            {"guided_regex": "a", "guided_whitespace_pattern": " "},
            "guided_whitespace_pattern",
            "is an option of JSON",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "is an option of JSON"),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_any_whitespace": True,
                    "whitespace_pattern": " ",
                }
            },
            "structured_outputs.whitespace_pattern",
            "exclude each other",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar_of(**fields(**given))
    assert caught.value.param == param
    assert message in str(caught.value)


def test_the_field_is_known_to_who_asks() -> None:
    found = grammar_field(**fields(structured_outputs={"regex": "a"}))
    assert found is not None
    assert found.name == "structured_outputs.regex"


def follows(grammar: Grammar | None, text: str) -> bool:
    """Return whether llguidance accepts ``text``, a byte at a time, as a whole output."""
    assert grammar is not None
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    taken = matcher.try_consume_tokens(list(text.encode()))
    return bool(taken == len(text) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("given", "allowed", "forbidden"),
    [
        (
            {"structured_outputs": {"json": SCHEMA}},
            ['{"a":1}', '{"a":\n 1}', '{"a":1,"b":2}'],
            ["{}", '{"a":"x"}'],
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            ['{"a":1}'],
            ['{"a": 1}', '{\n"a":1}'],
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "[ ]?"}},
            ['{"a":1}', '{"a": 1}'],
            ['{"a":  1}', '{"a":\n1}'],
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]"},
            ['{"a":1}', '{"a": 1}'],
            ['{"a":  1}'],
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            ['{"a":1}', '{"a": 1}'],
            ['{"a":1,"b":2}'],
        ),
    ],
)
def test_the_options_of_json(
    given: dict[str, Any], allowed: list[str], forbidden: list[str]
) -> None:
    grammar = grammar_of(**fields(**given))
    assert [text for text in allowed if not follows(grammar, text)] == []
    assert [text for text in forbidden if follows(grammar, text)] == []


def test_only_schemas_are_closed() -> None:
    """Values that look like a schema stay as they are, and so does what a schema says itself."""
    inner = {"type": "object", "properties": {"x": {}}}
    schema = {
        "properties": {"properties": inner, "open": {**inner, "additionalProperties": {}}},
        "enum": [{"properties": {}}],
        "not": inner,
        "items": [inner],
        "$defs": {"d": inner},
    }
    options = {"json": schema, "disable_additional_properties": True}
    grammar = grammar_of(**fields(structured_outputs=options))
    assert grammar is not None
    closed = {**inner, "additionalProperties": False}
    assert json.loads(grammar.text) == {
        "properties": {"properties": closed, "open": {**inner, "additionalProperties": {}}},
        "enum": [{"properties": {}}],
        "not": inner,
        "items": [closed],
        "$defs": {"d": closed},
        "additionalProperties": False,
    }


def test_a_deep_schema_is_not_closed() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}
    options = {"json": schema, "disable_additional_properties": True}
    with pytest.raises(InvalidRequest, match="at most 100 levels") as caught:
        grammar_of(**fields(structured_outputs=options))
    assert caught.value.param == "structured_outputs.disable_additional_properties"
