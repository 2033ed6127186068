"""Grammars of tool calls and reasoning, tried token by token on the default model's tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import llguidance
import pytest
import tokenizers
from llguidance.gbnf_to_lark import is_lark_syntax

from trioserve.model_files import locate, open_model
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.lark import HEADER, MAX_GBNF_CHARACTERS, lark_of
from trioserve.text.reasoning import after_reasoning
from trioserve.text.tool_parsers import FAMILIES, TextPiece, Tool, ToolUse

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer"}},
}
TOOLS = (Tool("weather", SCHEMA, strict=True), Tool("search"), Tool("loose", SCHEMA))
ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</parameter>"),
)
SPECIAL = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
GOOD = ("weather", '{"city": "Köln {", "days": 3}')
Write = Callable[..., str]


@functools.cache
def vocabulary(with_marks: bool) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """Return the default model's tokenizer, unchanged or with tokens of their own for all marks."""
    tokenizer = open_model(locate("smollm2-135m")).load_tokenizer()
    if with_marks:
        tokenizer.add_tokens(list(ADDED))
        tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer, llguidance.LLTokenizer(tokenizer.to_str(), eos_token=2)


def fits(lark: str, text: str, with_marks: bool) -> bool:
    """Return whether the grammar allows ``text`` as a whole output."""
    tokenizer, tokens = vocabulary(with_marks)
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    assert not llguidance.LLMatcher.validate_grammar(grammar, tokens)
    matcher = llguidance.LLMatcher(tokens, grammar)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    taken = matcher.try_consume_tokens(ids)
    assert not matcher.get_error()
    return bool(taken == len(ids) and matcher.is_accepting())


def token_of(with_marks: bool) -> Callable[[str], int | None]:
    return vocabulary(with_marks)[0].token_to_id


def written(family: str) -> Write:
    return lambda *calls: FAMILIES[family].write(calls)


WAYS = {family: written(family) for family in FAMILIES}
llama3, mistral = WAYS["llama3"], WAYS["mistral"]
TAGGED = ("qwen3_coder", "glm45")
families = pytest.mark.parametrize("family", WAYS)
vocabularies = pytest.mark.parametrize("with_marks", [False, True], ids=["spelled", "tokens"])


def grammar(family: str, use: ToolUse, with_marks: bool, template: str = "") -> str:
    return FAMILIES[family].grammar(use, token_of(with_marks), template)


@families
@vocabularies
def test_a_call_is_required(family: str, with_marks: bool) -> None:
    write = WAYS[family]
    lark = grammar(family, ToolUse(tools=TOOLS, required=True), with_marks)
    for calls in ([GOOD], [("search", "{}")], [GOOD, ("search", "{}"), GOOD]):
        assert fits(lark, write(*calls), with_marks)
    for name, arguments in (
        *(("unknown", "{}"), ("weather", "{}"), ("weather", '{"city": "x", "days": "y"}')),
        # In tags, a string is whatever stands there.
        *([] if family in TAGGED else [("weather", '{"city": 7}')]),
        ("loose", "{}"),
        *(("weather", '{"city": "x", "more": 1}'), ("search", '{"q": 1}'), ("search", "[]")),
    ):
        assert not fits(lark, write((name, arguments)), with_marks)
    for text in ("", "Hello", f"Well. {write(GOOD)}", write(GOOD)[:-2]):
        assert not fits(lark, text, with_marks)


@families
@vocabularies
def test_exactly_one_call(family: str, with_marks: bool) -> None:
    write = WAYS[family]
    use = ToolUse(tools=TOOLS[:1], required=True, parallel=False)
    lark = grammar(family, use, with_marks)
    assert fits(lark, write(GOOD), with_marks)
    assert not fits(lark, write(GOOD, GOOD), with_marks)
    assert not fits(lark, write(("search", "{}")), with_marks)


@families
@vocabularies
def test_strict_functions_among_free_answers(family: str, with_marks: bool) -> None:
    """Text is free; a call of a strict function follows its schema, one of another need not."""
    write = WAYS[family]
    lark = grammar(family, ToolUse(tools=TOOLS), with_marks)
    for text in ("", "Hello <there>", "1 {2} [3]", write(GOOD), write(GOOD, ("search", "{}"))):
        assert fits(lark, text, with_marks), text
    assert fits(lark, write(("search", '{"q": [1]}'), ("loose", "{}")), with_marks)
    assert not fits(lark, write(("weather", "{}")), with_marks)
    assert not fits(lark, write(("unknown", "{}")), with_marks)
    one = grammar(family, ToolUse(tools=TOOLS, parallel=False), with_marks)
    assert fits(one, write(GOOD), with_marks)
    assert fits(one, "Hello", with_marks)
    assert not fits(one, write(GOOD, GOOD), with_marks)


@pytest.mark.parametrize("family", ["hermes", "mistral", *TAGGED])
@vocabularies
def test_text_before_a_call(family: str, with_marks: bool) -> None:
    write = WAYS[family]
    lark = grammar(family, ToolUse(tools=TOOLS), with_marks)
    assert fits(lark, f"Let me see. {write(GOOD)}", with_marks)
    assert not fits(lark, f"Let me see. {write(('weather', '{}'))}", with_marks)


def test_the_tag_of_llama_3() -> None:
    call = llama3(GOOD)
    for required in (True, False):
        lark = grammar("llama3", ToolUse(tools=TOOLS, required=required), True)
        assert fits(lark, f"<|python_tag|>{call}", True)
        assert fits(lark, f"Let me see. <|python_tag|>{call}", True) is not required
        assert not fits(lark, f"<|python_tag|>{llama3(('weather', '{}'))}", True)


@vocabularies
def test_names_before_arguments_as_newer_mistral_models_write_them(with_marks: bool) -> None:
    call = "[TOOL_CALLS]{}[ARGS]{}".format
    for required in (True, False):
        use = ToolUse(tools=TOOLS, required=required)
        lark = grammar("mistral", use, with_marks, "{{ '[ARGS]' }}")
        assert fits(lark, call(*GOOD), with_marks)
        assert fits(lark, call(*GOOD) + call("search", "{}"), with_marks)
        assert not fits(lark, call("weather", "{}"), with_marks)
        assert not fits(lark, mistral(GOOD), with_marks)


@families
@vocabularies
def test_calls_or_an_answer_of_a_format(family: str, with_marks: bool) -> None:
    answer = lark_of(Grammar("json_schema", '{"type": "integer"}'), token_of(with_marks))
    lark = grammar(family, ToolUse(tools=TOOLS, answer=answer), with_marks)
    assert fits(lark, "42", with_marks)
    assert fits(lark, WAYS[family](GOOD), with_marks)
    assert not fits(lark, "Hello", with_marks)


@families
def test_what_a_grammar_allows_the_parser_reads(family: str) -> None:
    parser = FAMILIES[family].parser([tool.name for tool in TOOLS])
    events = parser.feed(WAYS[family](GOOD, ("search", "{}"))) + parser.finish()
    assert not any(isinstance(event, TextPiece) for event in events)
    assert len(events) == 4


@families
@vocabularies
def test_calls_behind_reasoning(family: str, with_marks: bool) -> None:
    lark = grammar(family, ToolUse(tools=TOOLS, required=True), with_marks)
    call = WAYS[family](GOOD)
    optional = after_reasoning(lark, token_of(with_marks), inside=False)
    assert fits(optional, call, with_marks)
    assert fits(optional, f"<think>\nHm {{.\n</think>\n\n{call}", with_marks)
    assert not fits(optional, "<think>Hm.</think>Hello", with_marks)
    assert not fits(optional, "<think>Hm.", with_marks)
    open_already = after_reasoning(lark, token_of(with_marks), inside=True)
    assert fits(open_already, f"Hm.\n</think>\n{call}", with_marks)
    assert not fits(open_already, "Hm.", with_marks)


TAG = {
    "structures": [
        {"begin": "<f=1>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<tool_call>", "schema": {"type": "boolean"}, "end": "</tool_call>"},
    ],
    "triggers": ["<f", "<tool_call>"],
}


@vocabularies
@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", '{"type": "integer"}', "12", "x"),
        ("regex", r"a/b\d+\n?c\/", "a/b12\nc/", "a/b"),
        ("choice", '["yes\\n", "no"]', "yes\n", "maybe"),
        ("grammar", 'root ::= "a" | "b" root', "bba", "c"),
        ("grammar", 'start: "a" B\nB: /b+/', "abb", "a"),
        ("structural_tag", json.dumps(TAG), "so <f=1>12</f> it is", "so <f=2>"),
        ("structural_tag", json.dumps(TAG), "so <tool_call>true</tool_call>", "<tool_call>1"),
    ],
)
def test_grammars_of_every_kind_behind_reasoning(
    kind: str, text: str, good: str, bad: str, with_marks: bool
) -> None:
    alone = lark_of(Grammar(kind, text), token_of(with_marks))
    behind = after_reasoning(alone, token_of(with_marks), inside=False)
    for lark in (alone, behind):
        assert fits(lark, good, with_marks)
        assert not fits(lark, bad, with_marks)
    assert fits(behind, f"<think>Hm.</think>\n{good}", with_marks)
    assert not fits(behind, f"<think>Hm.</think>\n{bad}", with_marks)


def test_a_text_that_is_not_of_its_kind() -> None:
    for kind, text in (("choice", "no JSON"), ("json_schema", "true"), ("structural_tag", "{}")):
        with pytest.raises(InvalidRequest, match=kind) as refused:
            lark_of(Grammar(kind, text), token_of(False))
        assert refused.value.param == "grammar"


def test_gbnf_is_bounded_where_it_is_contained() -> None:
    empty_lines = "\n" * (MAX_GBNF_CHARACTERS - 10)
    lark = 'start: "a"' + empty_lines
    assert lark_of(Grammar("grammar", 2 * f"{lark}\n"), token_of(False))
    most = 'root::="a"' + empty_lines
    assert lark_of(Grammar("grammar", most), token_of(False))
    with pytest.raises(
        InvalidRequest, match=r"^grammar must have at most 32768 .*got 32769"
    ) as long:
        lark_of(Grammar("grammar", most + "\n"), token_of(False))
    assert long.value.param == "grammar"


@pytest.mark.parametrize(
    "text", ["start:", "x\n\n\t start\v:", "%llguidance {}", "\n\n%llguidance"]
)
def test_what_is_lark_and_no_gbnf(text: str) -> None:
    assert is_lark_syntax(text)
    assert lark_of(Grammar("grammar", text), token_of(False)) == HEADER + text
