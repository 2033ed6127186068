"""Texts of models and of clients: parsers, matchers and decoders that see them piece by piece."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.target import Target
from tests.support.tiny_models import tiny_tokenizer
from trioserve.load import Record
from trioserve.load.exchange import Exchange
from trioserve.protocol.errors import InvalidRequest
from trioserve.text.reasoning import ReasoningSplitter
from trioserve.text.stop_regex import RegexStopMatcher, SearchBudget, check_stop_regex
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tool_parsers import FAMILIES, ArgumentsDelta, TextPiece, ToolCallStart

__all__ = ["TARGETS"]

MAX_SECONDS = 10.0
"""Processor time for one input, in seconds: many times that of the largest seed."""

_CUTS = st.lists(st.integers(0, 200), max_size=8)


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[start:end] for start, end in itertools.pairwise(places)]


# -- tool calls -----------------------------------------------------------------------------------

_CALL_TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            (
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "}", "{}"),
                *("<|python_tag|>", ";", "[", "]", '"', "\\", "\\u", "\\ud83d", "{", ",", ":"),
                *('{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '"name"', "f"),
                *(
                    '"{\\"a\\": ',
                    '\\"}"',
                    "<function=f>",
                    "</function>",
                    "<parameter=a>",
                    "</parameter>",
                ),
                *("f\n<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "\n<parameter=b>", "'"),
                *("\n", " ", "null", "1e999", "-", "\0", "\ud800", "é", "\u2028", "[" * 30),
            )
        ),
        st.text(max_size=6),
    ),
    max_size=16,
).map("".join)


def _read_calls(family: str, pieces: Sequence[str]) -> list[Any]:
    numbers = itertools.count()
    parser = FAMILIES[family].parser(["f"], lambda: f"call{next(numbers)}")
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    whole: list[Any] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            whole.append([event, ""])
        elif isinstance(event, ArgumentsDelta):
            calls = [each for each in whole if isinstance(each, list)]
            calls[event.index][1] += event.text
        else:
            assert isinstance(event, TextPiece)
            if whole and isinstance(whole[-1], str):
                whole[-1] += event.text
            else:
                whole.append(event.text)
    return whole


def _check_tool_calls(drawn: tuple[str, str, list[int]]) -> None:
    family, text, cuts = drawn
    assert _read_calls(family, _pieces(text, cuts)) == _read_calls(family, [text])


# -- reasoning ------------------------------------------------------------------------------------

_THOUGHTS = st.lists(
    st.one_of(
        st.sampled_from(("<think>", "</think>", "<", "<thi", "</thin", " ", "\n", ">", "\0")),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


def _split(pieces: Sequence[str], inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    parts = [splitter.feed(piece) for piece in pieces] + [splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


def _check_reasoning(drawn: tuple[str, list[int], bool]) -> None:
    text, cuts, inside = drawn
    assert _split(_pieces(text, cuts), inside) == _split([text], inside)


# -- stop regexes ---------------------------------------------------------------------------------

_PATTERNS = st.lists(
    st.sampled_from(
        (
            *("a", "b", ".", "*", "+", "?", "(", ")", "|", "[", "]", "^", "$", "{3}", "{1000}"),
            *(
                r"\b",
                r"\w",
                r"\1",
                "(?i)",
                "(?x)",
                "(?=",
                "(?!",
                "(?<=",
                "(?P<n>",
                "(?P=n)",
                "(?R)",
            ),
            *(
                "(?:",
                "(?R)",
                "{e<=2}",
                "(?|",
                "(?>",
                "\\p{L}",
                "\0",
                "é",
                "\ud800",
                "{",
                "}",
                ",",
                "#",
            ),
            *("(a+)+$", "(?1)", r"\L<x>", "(?V1)[a--b]", "(?r)", r"\K", r"\G", "{2,}"),
        )
    ),
    min_size=1,
    max_size=10,
).map("".join)
_OUTPUTS = st.lists(
    st.text("ab\n é.", max_size=12) | st.just("a" * 200) | st.text(max_size=4), max_size=6
)


def _check_stop_regex(drawn: tuple[str, list[str], bool]) -> None:
    pattern, pieces, include = drawn
    started = time.process_time()
    try:
        check_stop_regex([pattern])
        matcher = RegexStopMatcher((), [pattern], SearchBudget(), include=include)
        given = ""
        for piece in pieces:
            text, stop = matcher.feed(piece)
            given += text
            if stop is not None:
                assert stop == pattern
                break
        else:
            given += matcher.flush()
            assert given == "".join(pieces)
        assert "".join(pieces).startswith(given)
    except InvalidRequest:
        pass
    assert time.process_time() - started < MAX_SECONDS


# -- decoding -------------------------------------------------------------------------------------

_TOKENIZER = Tokenizer(tiny_tokenizer())


def _check_decoding(drawn: tuple[list[int], list[int], bool]) -> None:
    prompt, output, skip = drawn
    decoder = _TOKENIZER.incremental_decoder(prompt, skip_special_tokens=skip)
    text = "".join(decoder.push(token) for token in output) + decoder.flush()
    known = [token for token in output if token < _TOKENIZER.vocab_size]
    if not prompt:
        assert text == _TOKENIZER.decode(known, skip_special_tokens=skip)
    text.encode()  # no half of a surrogate pair


# -- answers of a server, as the load generator reads them -----------------------------------------


def _check_events(data: bytes) -> None:
    exchange = Exchange(Record(started=0.0))
    for start in range(0, len(data), 7):
        if exchange.receive(data[start : start + 7], 0.0):
            break
    exchange.close()


_HEAD = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_EVENTS = (
    _HEAD + b'\r\ndata: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n',
    _CHUNKED + b'1c\r\ndata: {"error": {"message": "x"}}\n\n\r\n0\r\n\r\n',
    _CHUNKED + b'20;x=y\r\ndata: {"choices": [{"text": "a"}]}\n\n\r\n0\r\nx: y\r\n\r\n',
    _HEAD + b'Content-Length: 27\r\n\r\n: comment\n\ndata: {"choices": []}',
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 429 Too Many\r\nContent-Length: 2\r\n\r\n{}",
)

TARGETS = (
    Target(
        "tool_calls",
        _check_tool_calls,
        st.tuples(st.sampled_from(sorted(FAMILIES)), _CALL_TEXTS, _CUTS),
    ),
    Target("reasoning", _check_reasoning, st.tuples(_THOUGHTS, _CUTS, st.booleans())),
    Target("stop_regex", _check_stop_regex, st.tuples(_PATTERNS, _OUTPUTS, st.booleans())),
    Target(
        "decoding",
        _check_decoding,
        st.tuples(
            st.lists(st.integers(0, 299), max_size=4),
            st.lists(st.integers(0, 310) | st.just(2**31 - 1), max_size=12),
            st.booleans(),
        ),
    ),
    Target("events", _check_events, seeds=lambda: _EVENTS),
)
