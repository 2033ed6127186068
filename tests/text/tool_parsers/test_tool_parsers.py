"""Tool calls out of text: every family, every way to cut the text, and what is broken."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.text.tool_parsers import (
    FAMILIES,
    ArgumentsDelta,
    TextPiece,
    Tool,
    ToolCallStart,
    family_of_template,
)
from trioserve.text.tool_parsers.mistral import mistral_call_id

NAMES = ("weather", "search")


@attrs.define
class Answer:
    """The result of a client: text, and (id, name, arguments) of calls."""

    text: str = ""
    calls: list[list[str]] = attrs.field(factory=list)


def parsed(family: str, pieces: list[str]) -> Answer:
    numbers = itertools.count()
    parser = FAMILIES[family].parser(NAMES, lambda: f"id{next(numbers)}")
    answer = Answer()
    events = [event for piece in pieces for event in parser.feed(piece)]
    for event in [*events, *parser.finish()]:
        if isinstance(event, TextPiece):
            assert event.text
            answer.text += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(answer.calls)
            answer.calls.append([event.id, event.name, ""])
        else:
            assert isinstance(event, ArgumentsDelta)
            assert event.text
            assert event.index == len(answer.calls) - 1
            answer.calls[event.index][2] += event.text
    assert parser.finish() == []
    return answer


def text_and_calls(family: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    answer = parsed(family, [text])
    return answer.text, [(name, arguments) for _, name, arguments in answer.calls]


PARIS = '{"city": "Paris {\\"}", "days": [1, {"of": null}], "ø": "…"}'


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        # Hermes
        (
            "hermes",
            f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
            "",
            [("weather", PARIS)],
        ),
        (
            "hermes",
            'Let me look.\n<tool_call>{"name": "search", "arguments": {}}</tool_call>\n'
            '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>\n',
            "Let me look.",
            [("search", "{}"), ("weather", '{"city": "Rome"}')],
        ),
        (
            "hermes",
            'a <tool_call>{"name": "search", "arguments": {}}</tool_call> b',
            "a  b",
            [("search", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "search"}</tool_call>', "", [("search", "{}")]),
        (
            "hermes",
            '<tool_call>{"id": "x", "type": "function", "name": "search", "parameters": {"q": 1}}'
            "</tool_call>",
            "",
            [("search", '{"q": 1}')],
        ),
        # A brace too few, a brace too many, no end: still calls.
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"q": 1}</tool_call>',
            "",
            [("search", '{"q": 1}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"q": 1}}}</tool_call>',
            "}",
            [("search", '{"q": 1}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {"q": 1}}',
            "",
            [("search", '{"q": 1}')],
        ),
        # Cut off, and broken inside the arguments: what the model wrote, for the client to judge.
        ("hermes", '<tool_call>{"name": "search", "arguments": {"q', "", [("search", '{"q')]),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {\'q\': 1}}</tool_call> more',
            " more",
            [("search", "{'q': 1}}")],
        ),
        # Several calls between two tags.
        (
            "hermes",
            '<tool_call>\n[{"name": "search", "arguments": {"q": [1]}},\n{"name": "weather"}]\n'
            '</tool_call>\n<tool_call>{"name": "search"}</tool_call>',
            "",
            [("search", '{"q": [1]}'), ("weather", "{}"), ("search", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {}} , {"name": "weather"}</tool_call>',
            "",
            [("search", "{}"), ("weather", "{}")],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": {}}, or so</tool_call>.',
            ", or so.",
            [("search", "{}")],
        ),
        # Arguments as text: the object that it is, if it is one.
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{\\"q\\": \\"ø\\"}"}</tool_call>',
            "",
            [("search", '{"q": "ø"}')],
        ),
        (
            "hermes",
            '<tool_call>{"arguments": "{\\"q\\": 1}", "name": "search"}</tool_call>',
            "",
            [("search", '{"q": 1}')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{now}"}</tool_call>',
            "",
            [("search", '"{now}"')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1} and"}</tool_call>',
            "",
            [("search", '"{\\"q\\": 1} and"')],
        ),
        (
            "hermes",
            r'<tool_call>{"name": "search", "arguments": "{\"q\": \"\ud83d\"}"}</tool_call>',
            "",
            [("search", r'"{\"q\": \"\ud83d\"}"')],
        ),
        (
            "hermes",
            '<tool_call>{"name": "search", "arguments": "{\\"q\\": ',
            "",
            [("search", '"{\\"q\\": ')],
        ),
        # Llama 3
        (
            "llama3",
            '{"name": "search", "parameters": {"q": 1}}\n{"name": "weather", "parameters": {}}',
            "",
            [("search", '{"q": 1}'), ("weather", "{}")],
        ),
        (
            "llama3",
            'I have {1} way: {"name": "search", "parameters": {"q": 1}}; '
            '{"name": "weather", "parameters": {}};\n{fine}?',
            "I have {1} way: ;\n{fine}?",
            [("search", '{"q": 1}'), ("weather", "{}")],
        ),
        (
            "llama3",
            '{"name": "search", "parameters": {"q": 1}}; {"name": "weather", "parameters": {}}',
            "",
            [("search", '{"q": 1}'), ("weather", "{}")],
        ),
        (
            "llama3",
            '<|python_tag|>{"name": "search", "parameters": {"q": 1}};'
            '<|python_tag|>{"name": "search", "parameters": {}}',
            "",
            [("search", '{"q": 1}'), ("search", "{}")],
        ),
        (
            "llama3",
            'I look. <|python_tag|>{"name": "search", "parameters": {}}',
            "I look.",
            [("search", "{}")],
        ),
        (
            "llama3",
            '{"name": "search", "parameters": {}}; and so on',
            "; and so on",
            [("search", "{}")],
        ),
        # Mistral
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "search", "arguments": {"q": 1}}, '
            '{"name": "weather", "arguments": {}, "id": "abcdefghi"}]',
            "",
            [("search", '{"q": 1}'), ("weather", "{}")],
        ),
        (
            "mistral",
            'Well.[TOOL_CALLS]search{"q": 1}[TOOL_CALLS]weather[ARGS]{"city": "Köln"}',
            "Well.",
            [("search", '{"q": 1}'), ("weather", '{"city": "Köln"}')],
        ),
        (
            "mistral",
            '[TOOL_CALLS]{"name": "search", "arguments": {"q": 1}}',
            "",
            [("search", '{"q": 1}')],
        ),
        (
            "mistral",
            "[TOOL_CALLS]search[ARGS]{q: 1>[TOOL_CALLS]weather{}",
            "",
            [("search", "{q: 1>"), ("weather", "{}")],
        ),
        # JSON
        (
            "json",
            '\n{"name": "search", "arguments": {"q": "}"}}\n',
            "",
            [("search", '{"q": "}"}')],
        ),
        (
            "json",
            '[{"name": "search", "arguments": {}}, {"name": "weather", "parameters": {"city": 1}}]',
            "",
            [("search", "{}"), ("weather", '{"city": 1}')],
        ),
    ],
)
def test_calls(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert text_and_calls(family, text) == (content, calls)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Hello <tool_ca and </tool_call> "),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>weather(city='Paris')</tool_call>"),
        ("hermes", '<tool_call>{"name": "search", "argum'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call> [{"name": "unknown", "arguments": {}}]</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", '{"name": "search", "arguments": {}}'),
        ("llama3", '{"city": "Paris"}'),
        ("llama3", '<|python_tag|>print("hello")'),
        ("llama3", 'It is {"name": "search"} or {"name": "unknown", "parameters": {}}'),
        ("llama3", 'It is {"name": "search", "para'),
        ("llama3", "<|python"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] I can't do that"),
        ("mistral", "[TOOL_CALLS]unknown{}"),
        ("mistral", "[TOOL_CALLS]" + "long " * 100),
        ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS][]"),
        ("json", '{"answer": 42}'),
        ("json", '[1, 2, {"name": "search"}]'),
        ("json", "  [] "),
        ("json", 'Sure: {"name": "search", "arguments": {}}'),
        ("json", ""),
        ("json", " \n"),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(family: str, text: str) -> None:
    assert text_and_calls(family, text) == (text, [])


def test_a_grammar_lets_calls_of_llama_3_stand_in_no_text() -> None:
    """Check that text with a call behind it isn't taken for a call: there no schema holds."""
    text = 'As JSON: {"name": "search", "parameters": {}}'
    for free, expected in ((True, 1), (False, 0)):
        parser = FAMILIES["llama3"].parser.of([Tool("search")], free=free)
        events = parser.feed(text) + parser.finish()
        assert sum(isinstance(event, ToolCallStart) for event in events) == expected


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "["),
        *('{"name": "search", "arguments": ', '{"name": "weather", "parameters": ', "]", "{}", "}"),
        *('"{\\\\"a\\\\": 1}"', '{"name": "search", ', "\n<parameter=q>", "\n</tool_call>"),
        *('{"a": "\\"}é"}', "search", "text ", "\n", " ", '"', "\\", "{", ",", '"arguments": {}'),
        *("<function=search>", "</function>", "<parameter=q>", "</parameter>", "search\n"),
        *("<arg_key>q</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>"),
        '{"name": "unknown", "arguments": ',
    ]
)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(PIECES, max_size=12), data=st.data())
def test_cutting_the_text_changes_nothing(family: str, parts: list[str], data: Any) -> None:
    text = "".join(parts)
    places = st.lists(st.integers(0, len(text)), max_size=8).map(sorted)
    cuts = [0, *data.draw(places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    expected = parsed(family, [text])
    assert parsed(family, pieces) == expected
    assert parsed(family, list(text)) == expected


ARGUMENTS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), st.booleans(), st.sampled_from([None, 2]))
def test_any_arguments_come_out_as_they_went_in(
    all_arguments: list[dict[str, Any]], ascii: bool, indent: int | None
) -> None:
    texts = [json.dumps(each, ensure_ascii=ascii, indent=indent) for each in all_arguments]
    written = {
        "hermes": "\n".join(
            f'<tool_call>{{"name": "search", "arguments": {each}}}</tool_call>' for each in texts
        ),
        "llama3": "; ".join(f'{{"name": "search", "parameters": {each}}}' for each in texts),
        "mistral": "".join(f"[TOOL_CALLS]search{each}" for each in texts),
        "json": f"[{', '.join(_object(each) for each in texts)}]",
    }
    for family, text in written.items():
        assert text_and_calls(family, text) == ("", [("search", each) for each in texts])


def _object(arguments: str) -> str:
    return f'{{"name": "search", "arguments": {arguments}}}'


def test_arguments_are_streamed_as_they_come() -> None:
    parser = FAMILIES["hermes"].parser(NAMES)
    begin = '<tool_call>{"name": "search", "arguments": {"q": '
    (start, first) = parser.feed(begin)
    assert isinstance(start, ToolCallStart)
    assert first == ArgumentsDelta(0, '{"q": ')
    assert parser.feed('"lo') == [ArgumentsDelta(0, '"lo')]
    assert parser.feed('ng"}') == [ArgumentsDelta(0, 'ng"}')]
    assert parser.feed("}</tool_") == []
    assert parser.feed("call>") == []
    assert parser.feed("text") == [TextPiece("text")]


def test_text_is_streamed_as_it_comes() -> None:
    for family in FAMILIES:
        parser = FAMILIES[family].parser(NAMES)
        assert parser.feed("Hello") == [TextPiece("Hello")]
        assert parser.feed(" there") == [TextPiece(" there")]


def test_ids() -> None:
    """Mistral's templates insist on nine letters and digits, and a model's own id is kept."""
    start, _ = FAMILIES["hermes"].parser(NAMES).feed('<tool_call>{"name": "search", "arguments": {')
    assert isinstance(start, ToolCallStart)
    assert start.id.startswith("call_")
    assert len(mistral_call_id()) == 9
    assert mistral_call_id().isalnum()
    assert mistral_call_id() != mistral_call_id()
    answer = parsed("mistral", ["[TOOL_CALLS]search[CALL_ID]a1b2c3d4e[ARGS]{}"])
    assert answer.calls == [["a1b2c3d4e", "search", "{}"]]


@pytest.mark.parametrize(
    ("family", "begin", "repeated"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"a": "', "x"),
        ("hermes", "", " <"),
        ("hermes", '<tool_call>{"nam', " "),
        ("llama3", '{"name": "search", "parameters": {}};', " "),
        ("llama3", "x", "<|python_tag"),
        ("mistral", "[TOOL_CALLS]", " "),
        ("mistral", "[TOOL_CALLS]search", "a"),
        ("json", '{"arguments": ', "["),
        ("json", "", "\n"),
        ("qwen3_coder", "<tool_call>", " "),
        ("qwen3_coder", "<tool_call><function=", "a"),
        ("qwen3_coder", "<tool_call><function=search><parameter=", "a"),
        ("qwen3_coder", "<tool_call><function=search><parameter=q>", "<"),
        ("glm45", "<tool_call>", " "),
        ("glm45", "<tool_call>search\n", "<arg_key>q</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_time_grows_with_the_text_and_not_faster(family: str, begin: str, repeated: str) -> None:
    """Fifty thousand pieces take part of a second; with quadratic work they took minutes."""
    parser = FAMILIES[family].parser(NAMES)
    started = time.process_time()
    parser.feed(begin)
    for _ in range(50_000):
        parser.feed(repeated)
    parser.finish()
    assert time.process_time() - started < 60


@pytest.mark.parametrize(
    ("template", "knows_tools", "family"),
    [
        ("{{ messages }}", False, "json"),
        ("{% for tool in tools %}<tool_call>", True, "hermes"),
        ("{{ tools }}[TOOL_CALLS]", True, "mistral"),
        ("{{ tools }}<|python_tag|>", True, "llama3"),
        ('{{ tools }}<|start_header_id|>{"name": x, "parameters": y}', True, "llama3"),
        ("{{ tools }}<|tool|>", True, None),
        ("{{ tools }}'<tool_call>\\n<function=' + name\\n'<parameter='", True, "qwen3_coder"),
        ("{{ tools }}<tool_call>{name}\n<arg_key>{k}</arg_key>\n<arg_value>", True, "glm45"),
        ("{{ tools }}<tool_call>\n<name>{{ name }}</name>", True, None),
        ("{{ tools }}'<tool_call>\\n<invoke name='", True, None),
        ("{{ tools }}within <tool_call></tool_call> tags", True, "hermes"),
    ],
)
def test_the_family_by_the_template(template: str, knows_tools: bool, family: str | None) -> None:
    found = family_of_template(template, knows_tools=knows_tools)
    assert (None if found is None else found.name) == family
