"""Calls with a tag around each argument: values, types, what is broken."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.text.tool_parsers import FAMILIES, ArgumentsDelta, TextPiece, Tool, ToolCallStart
from trioserve.text.tool_parsers.xml_values import types_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "places": {"$ref": "#/$defs/places"},
        "any": {},
    },
    "$defs": {"places": {"type": "array", "items": {"type": "string"}}},
}
TOOLS = (Tool("weather", SCHEMA), Tool("search"))
TAGGED = ("qwen3_coder", "glm45")
families = pytest.mark.parametrize("family", TAGGED)


def parsed(family: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of an answer, and the names and arguments of its calls."""
    parser = FAMILIES[family].parser.of(TOOLS)
    events = [event for piece in pieces for event in parser.feed(piece)]
    text, calls = "", list[list[str]]()
    for event in [*events, *parser.finish()]:
        if isinstance(event, TextPiece):
            text += event.text
        elif isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        else:
            calls[event.index][1] += event.text
    return text, [(name, arguments) for name, arguments in calls]


def qwen(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


WRITTEN = {"qwen3_coder": qwen, "glm45": glm}


@families
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("city", "Köln", "Köln"),
        ("city", "3", "3"),
        ("city", 'say "hi"\n\\ <b>', 'say "hi"\n\\ <b>'),
        ("city", "", ""),
        ("city", "  two\n\nlines  ", "  two\n\nlines  "),
        ("days", "3", 3),
        ("days", " 3 ", 3),
        ("days", "three", "three"),
        ("exact", "true", True),
        ("exact", "True", True),
        ("unit", "null", None),
        ("unit", "None", None),
        ("unit", "5", "5"),
        ("unit", "C", "C"),
        ("places", '["a", "b"]', ["a", "b"]),
        # Numbers that no double holds, JSON with escaped quotes, Python's own notation.
        ("days", "1e999", "1e999"),
        ("places", "[1, 1e999]", "[1, 1e999]"),
        ("places", r"[\"a\", \"b\\\\c\"]", ["a", "b\\c"]),
        ("places", "['a', None, \"it's\"]", ["a", None, "it's"]),
        ("places", "('a', 'b')", "('a', 'b')"),
        ("places", "['a', 1e999]", "['a', 1e999]"),
        ("places", "[a, b]", "[a, b]"),
        ("places", r"[\"\ud83d\"]", r"[\"\ud83d\"]"),
        ("places", r"['\ud83d']", r"['\ud83d']"),
        ("places", f"[{'-' * 10_000}1]", f"[{'-' * 10_000}1]"),
        ("any", "['a']", "['a']"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "NaN", "NaN"),
        ("any", "words", "words"),
        ("unknown", "1.5", 1.5),
    ],
)
def test_a_value_by_its_schema(family: str, name: str, value: str, expected: Any) -> None:
    text = WRITTEN[family]("weather", **{name: value})
    for pieces in ([text], list(text)):
        content, ((called, arguments),) = parsed(family, pieces)
        assert (content, called) == ("", "weather")
        assert json.loads(arguments) == {name: expected}


@families
def test_calls_among_text(family: str) -> None:
    write = WRITTEN[family]
    first, second = write("weather", city="Köln", days="3"), write("search")
    text = f"Let me see.\n{first}\n{second}\n"
    expected = [("weather", '{"city": "Köln", "days": 3}'), ("search", "{}")]
    assert parsed(family, [text]) == ("Let me see.", expected)
    assert parsed(family, [f"{first} and {second} done"]) == (" and  done", expected)


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        # Another function, JSON or nothing inside: text.
        ("qwen3_coder", qwen("unknown", q="1"), qwen("unknown", q="1"), []),
        ("glm45", glm("unknown", q="1"), glm("unknown", q="1"), []),
        (
            "glm45",
            '<tool_call>{"name": "x"}</tool_call>',
            '<tool_call>{"name": "x"}</tool_call>',
            [],
        ),
        ("qwen3_coder", "<tool_call>no", "<tool_call>no", []),
        ("qwen3_coder", "<tool_call>\n<func", "<tool_call>\n<func", []),
        ("glm45", "<tool_call>sea", "<tool_call>sea", []),
        # The outer tag is forgotten, or the line break behind the name.
        ("qwen3_coder", "<function=search>\n</function>", "", [("search", "{}")]),
        ("qwen3_coder", "<function=search></tool_call> x", " x", [("search", "{}")]),
        ("glm45", "<tool_call>search</tool_call>", "", [("search", "{}")]),
        (
            "glm45",
            "<tool_call>search<arg_key>q</arg_key><arg_value>1</arg_value></tool_call>",
            "",
            [("search", '{"q": 1}')],
        ),
        # Closing tags of values are forgotten, or that of a key.
        (
            "qwen3_coder",
            "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n<parameter=days>\n3\n"
            "</function>\n</tool_call> x",
            " x",
            [("weather", '{"city": "Köln", "days": 3}')],
        ),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city\n<arg_value>Köln\n<arg_key>days</arg_key>\n"
            "<arg_value>3\n</tool_call> x",
            " x",
            [("weather", '{"city": "Köln", "days": 3}')],
        ),
        # Cut off: what was written so far, which is no whole object.
        (
            "qwen3_coder",
            qwen("weather", city="Köln").partition("ln")[0],
            "",
            [("weather", '{"city": "Kö')],
        ),
        (
            "qwen3_coder",
            qwen("weather", days="31").partition("1")[0],
            "",
            [("weather", '{"days": 3')],
        ),
        (
            "qwen3_coder",
            qwen("weather", city="Köln").partition("ameter>\n</f")[0],
            "",
            [("weather", '{"city": "Köln')],
        ),
        ("glm45", glm("search", q="1")[:-12], "", [("search", '{"q": 1}'[:-1])]),
    ],
)
def test_what_is_not_as_it_should_be(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parsed(family, [text]) == (content, calls)
    assert parsed(family, list(text)) == (content, calls)


@families
def test_a_string_under_a_grammar_ends_with_its_tag_alone(family: str) -> None:
    """Check that a string may hold any text, since a grammar closes every value."""
    city = "Köln\n<parameter=days>\n</function>\n</tool_call>\n<arg_key>"
    text = WRITTEN[family]("weather", city=city)
    parser = FAMILIES[family].parser.of(TOOLS, free=False)
    events = parser.feed(text) + parser.finish()
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert json.loads(arguments) == {"city": city}


def test_strings_are_streamed_as_they_come() -> None:
    parser = FAMILIES["qwen3_coder"].parser.of(TOOLS)
    (start, first) = parser.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert isinstance(start, ToolCallStart)
    assert first == ArgumentsDelta(0, '{"city": "')
    assert parser.feed("Kö") == [ArgumentsDelta(0, "Kö")]
    assert parser.feed('"ln\n') == [ArgumentsDelta(0, '\\"ln')]
    assert parser.feed("</para") == []
    assert parser.feed("meter>\n") == [ArgumentsDelta(0, '"')]
    assert parser.feed("</function>") == [ArgumentsDelta(0, "}")]


VALUES = {
    "city": st.text(max_size=12).filter(lambda text: "</" not in text),
    "days": st.integers(),
    "exact": st.booleans(),
    "places": st.lists(st.text(max_size=5).filter(lambda text: "</" not in text), max_size=3),
}


@families
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3),
    data=st.data(),
)
def test_what_is_written_is_read(family: str, calls: list[dict[str, Any]], data: Any) -> None:
    text = FAMILIES[family].write([("weather", json.dumps(call)) for call in calls])
    places = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    cuts = [0, *data.draw(places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    content, found = parsed(family, pieces)
    assert content == ""
    assert [json.loads(arguments) for _, arguments in found] == calls


def test_types_of_schemas() -> None:
    nested = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert types_of(nested) == frozenset()
    assert types_of({"enum": ["a", 1, None]}) == {"string", "integer", "null"}
    assert types_of({"const": True}) == {"boolean"}
    assert types_of({"type": ["string", "null"]}) == {"string", "null"}
