"""Structural tags by ``format``: what outputs they allow, token by token, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.text.tool_parsers.test_grammars import fits, token_of, vocabularies
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.structural_tags import (
    MAX_FORMAT_DEPTH,
    any_lark_of,
    check_format,
    format_lark,
)

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(number: int) -> dict[str, Any]:
    return {"begin": f"<tool_call>{number}:", "content": NUMBER, "end": "</tool_call>"}


def triggered(**options: bool) -> dict[str, Any]:
    tags = [tag(1), tag(2)]
    return {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, **options}


def separated(**options: bool) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [tag(1)], "separator": ", ", **options}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


THINK = {"type": "tag", "begin": "<think>", "content": ANY, "end": ["</think>", "!"]}
ONE, TWO = "<tool_call>1:3</tool_call>", "<tool_call>2:-4</tool_call>"


@vocabularies
@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (const("Hi"), ["Hi"], ["Ho", "", "Hi!"]),
        (sequence(const("a"), NUMBER), ["a12"], ["12", "a"]),
        ({"type": "or", "elements": [const("a"), NUMBER]}, ["a", "7"], ["b", "a7"]),
        ({"type": "regex", "pattern": "a+/"}, ["aa/"], ["b"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["x"], ["z"]),
        ({"type": "any_text", "excludes": ["bad", "no/pe"]}, ["fine", ""], ["a bad b", "no/pe"]),
        (THINK, ["<think>x < y</think>", "<think>x!"], ["<think>x", "x", "<think>x!y</think>"]),
        (sequence(ANY, const("END")), ["abc END", "END"], ["abc", "END abc"]),
        (sequence(ANY, THINK), ["abc <think>d</think>"], ["abc", "abc <think>"]),
        (triggered(), ["", "x", f"x{ONE}y{TWO}"], ["<tool_call>3:1</tool_call>", f"{ONE[:-3]}"]),
        (triggered(at_least_one=True), [ONE, f"{TWO}y{ONE}z"], ["", f"x{ONE}"]),
        (triggered(stop_after_first=True), ["", "x", f"x{ONE}"], [f"{ONE}y", f"{ONE}{TWO}"]),
        (triggered(stop_after_first=True, at_least_one=True), [ONE], ["", f"{ONE}y"]),
        (separated(), ["", ONE, f"{ONE}, {ONE}"], [f"{ONE}, ", TWO, "x"]),
        (separated(at_least_one=True, stop_after_first=True), [ONE], ["", f"{ONE}, {ONE}"]),
        (sequence(THINK, triggered()), [f"<think>a</think>b{ONE}c"], ["b"]),
    ],
)
def test_what_outputs_it_allows(
    format: dict[str, Any], good: list[str], bad: list[str], with_marks: bool
) -> None:
    lark = format_lark(format, token_of(with_marks))
    assert [text for text in good if not fits(lark, text, with_marks)] == []
    assert [text for text in bad if fits(lark, text, with_marks)] == []


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (5, "format: a format is an object"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "format.type: one of const_string"),
        (const(""), "format.value: it must be a string"),
        ({**const("a"), "values": 1}, "format.values: value are served here"),
        ({"type": "json_schema", "json_schema": 1}, "format.json_schema: a JSON schema is"),
        ({"type": "json_schema", "json_schema": {}, "style": "xml"}, "format.style"),
        (sequence(), "format.elements: it must be a list of at least one object"),
        (sequence(ANY, NUMBER), "format.elements[1]: what comes behind any_text"),
        (sequence(triggered(), NUMBER), "format.elements[0]: free text comes last"),
        ({**triggered(), "triggers": ["<x"]}, "format.tags[0].begin: it begins with none"),
        (triggered(at_least_one=1), "format.at_least_one: it must be true or false"),  # type: ignore[arg-type]
        ({**separated(), "tags": [5]}, "format.tags: it must hold objects"),
        (
            sequence(*[{"type": "grammar", "grammar": 'root ::= "x"' + " " * 20_000}] * 2),
            "format.elements[1].grammar: grammars have at most",
        ),
        ({**THINK, "end": 5}, "format.end: it must be a list"),
        ({"type": "any_text", "exclude": ["x"]}, "format.exclude: excludes"),
    ],
)
def test_what_is_refused(format: Any, message: str) -> None:
    with pytest.raises(InvalidRequest):
        check_format(format)
    with pytest.raises(InvalidRequest) as caught:
        format_lark(format, lambda _: None)
    assert str(caught.value).startswith(f"grammar: {message}")
    assert caught.value.param == "grammar"


def test_formats_are_not_nested_without_end() -> None:
    format = const("a")
    for _ in range(MAX_FORMAT_DEPTH):
        format = sequence(format)
    format_lark(format, lambda _: None)
    with pytest.raises(InvalidRequest, match="nested at most"):
        format_lark(sequence(format), lambda _: None)


@vocabularies
def test_beside_other_grammars(with_marks: bool) -> None:
    grammar = Grammar("structural_tag", '{"format": {"type": "const_string", "value": "a"}}')
    assert fits(any_lark_of(grammar, token_of(with_marks)), "a", with_marks)
    text = '{"triggers": ["<a>"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}'
    lark = any_lark_of(Grammar("structural_tag", text), token_of(with_marks))
    assert fits(lark, "b <a>1</a>", with_marks)
