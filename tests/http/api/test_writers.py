"""Prepared events: byte for byte what the classes of the API's schema encode."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from tests.support.http_stub import StubTokenizer, with_logprobs
from trioserve.http.api.anthropic.schemas import ContentBlockDelta, TextDelta
from trioserve.http.api.anthropic.writer import MessageWriter
from trioserve.http.api.ollama.schemas import (
    OllamaAnswer,
    OllamaChatResponse,
    OllamaGenerateResponse,
)
from trioserve.http.api.ollama.writer import ChatLines, GenerateLines
from trioserve.http.api.openai.chat.answer import ReaderOptions
from trioserve.http.api.openai.chat.format import ChatFormat
from trioserve.http.api.openai.chat.schemas import ChatChunkChoice, ChatCompletionChunk, Delta
from trioserve.http.api.openai.chat.writer import ChatWriter, WantedChat
from trioserve.http.api.openai.completions.schemas import CompletionChoice, CompletionResponse
from trioserve.http.api.openai.completions.writer import CompletionWriter, Wanted
from trioserve.http.api.sglang.schemas import GenerateResponse, MetaInfo
from trioserve.http.api.sglang.writer import NativeWriter
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import GenerationStream
from trioserve.requests.prompts import ChatPrompt, TextPrompt
from trioserve.requests.request import Request, Times
from trioserve.requests.stream import Chunk, Stream, StreamBudget

# A backslash, a quote and a NUL are what a prepared event could be cut at in the wrong place.
TEXTS = st.text(st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from('\\"\0u')))
NAMES = st.one_of(TEXTS, st.sampled_from(['"\0"', "\0", '"', '\\"\\u0000"', "\\u0000"]))
CHAT = ChatPrompt(messages=({"role": "user", "content": "x"},))


def stream(prompt: Any = CHAT) -> GenerationStream:
    return GenerationStream(
        Request(
            id="id",
            prompt=prompt,
            params=SamplingParams(),
            stream=Stream(StreamBudget(1 << 20, 1 << 20)),
            times=Times(0.0),
            prompt_ids=[1, 2],
        )
    )


def wanted_chat(wanted: dict[str, Any]) -> WantedChat:
    tokenizer = cast(Any, StubTokenizer())
    style = ChatFormat(
        tokenizer=tokenizer, template="", variables=frozenset(), family=None, reasons=False
    )
    options = ReaderOptions(format=style, prompt=CHAT, **wanted.pop("options", {}))
    return WantedChat(tokenizer=tokenizer, options=options, **wanted)


def chat_writer(wanted: dict[str, Any], **fields: Any) -> ChatWriter:
    return ChatWriter(
        **{"id": "id", "model": "m", "created": 1, "include_usage": False, **fields},
        wanted=wanted_chat(wanted),
    )


def message_writer(wanted: dict[str, Any], **fields: Any) -> MessageWriter:
    options = wanted_chat(wanted).options
    return MessageWriter(**{"id": "id", "model": "m", "options": options, **fields})


def line_writer(wanted: dict[str, Any], **fields: Any) -> ChatLines:
    return ChatLines(**{"model": "m", "started": 0.0, "wanted": wanted_chat(wanted), **fields})


def completion_writer(wanted: dict[str, Any], **fields: Any) -> CompletionWriter:
    return CompletionWriter(
        **{"id": "id", "model": "m", "created": 1, "include_usage": False, **fields},
        prompts=[TextPrompt("x"), TextPrompt("y")],
        wanted=Wanted(tokenizer=cast(Any, StubTokenizer()), **wanted),
    )


def encoded(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


@given(
    id=NAMES,
    model=NAMES,
    texts=st.lists(TEXTS, max_size=4),
    n=st.integers(1, 3),
    usage=st.booleans(),
)
def test_chat(id: str, model: str, texts: list[str], n: int, usage: bool) -> None:
    writer = chat_writer({"n": n}, id=id, model=model, include_usage=usage)
    writer.start([stream()])
    for number, text in enumerate(texts):
        chunk = Chunk(text, (7,), index=number % n)
        response = ChatCompletionChunk(
            id=id,
            created=1,
            model=model,
            choices=[ChatChunkChoice(number % n, Delta(content=text))],
            usage=None if usage else UNSET,
        )
        expected = encoded(response) if text else b""
        assert writer.text(chunk) == expected == writer.chunk(0, chunk)


@given(
    id=NAMES,
    model=NAMES,
    texts=st.lists(TEXTS, max_size=4),
    n=st.integers(1, 3),
    usage=st.booleans(),
)
def test_completions(id: str, model: str, texts: list[str], n: int, usage: bool) -> None:
    writer = completion_writer({"n": n}, id=id, model=model, include_usage=usage)
    writer.start([stream(), stream()])
    for number, text in enumerate(["begin"] * n + texts):
        for prompt in (0, 1):
            chunk = Chunk(text, (7,), index=number % n)
            response = CompletionResponse(
                id=id,
                created=1,
                model=model,
                choices=[CompletionChoice(prompt * n + number % n, text, None, None, None)],
                usage=None if usage else UNSET,
            )
            expected = encoded(response) if text else b""
            quick = writer.text(chunk)
            assert writer.chunk(prompt, chunk) == expected
            if prompt == 0:
                assert quick == (None if number < n else expected)


PLAIN = Chunk("text", (7,))


@pytest.mark.parametrize(
    "chunk",
    [
        with_logprobs(PLAIN, 2),
        Chunk("text", (7,), finish_reason="stop"),
        Chunk("", finish_reason="length"),
    ],
)
@pytest.mark.parametrize("make", [chat_writer, completion_writer])
def test_what_adds_more_than_text_takes_the_long_way(make: Any, chunk: Chunk) -> None:
    writer = make({})
    writer.start([stream()])
    writer.chunk(0, PLAIN)
    assert writer.text(PLAIN) is not None
    assert writer.text(chunk) is None
    assert writer.chunk(0, chunk)


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [({"token_ids": True}, {}), ({}, {"include_usage": True, "continuous_usage": True})],
)
@pytest.mark.parametrize("make", [chat_writer, completion_writer])
def test_what_every_event_tells_takes_the_long_way(make: Any, wanted: Any, fields: Any) -> None:
    writer = make(wanted, **fields)
    writer.start([stream()])
    writer.chunk(0, PLAIN)
    assert writer.text(PLAIN) is None


def test_answers_that_are_taken_apart_take_the_long_way() -> None:
    writer = chat_writer({"options": {"hidden": re.compile("<x>")}})
    writer.start([stream()])
    assert writer.text(PLAIN) is None


@given(id=NAMES, texts=st.lists(TEXTS, min_size=1, max_size=5))
def test_native(id: str, texts: list[str]) -> None:
    params = SamplingParams()
    writer = NativeWriter(
        batch=cast(
            Any,
            SimpleNamespace(
                jobs=[SimpleNamespace(request_id=id, params=params)],
                num_outputs=1,
                listed=False,
                starts=[None],
            ),
        ),
        tokenizer=cast(Any, StubTokenizer()),
        eos_token_ids=(0,),
        with_text=False,
        with_prompt_ids=False,
    )
    writer.start([stream(TextPrompt("x"))])
    for number, text in enumerate(texts, 1):
        event = writer.chunk(0, Chunk(text, (number, 7)))
        if not text:
            assert event == b""
            continue
        decoded = msgspec.json.decode(event.removeprefix(b"data: "), type=GenerateResponse)
        meta = MetaInfo(
            id=id,
            finish_reason=None,
            prompt_tokens=2,
            completion_tokens=2 * number,
            cached_tokens=0,
            e2e_latency=decoded.meta_info.e2e_latency,
        )
        ids = [token for each in range(1, number + 1) for token in (each, 7)]
        whole = GenerateResponse(text="".join(texts[:number]), output_ids=ids, meta_info=meta)
        assert event == encoded(whole)


@given(id=NAMES, model=NAMES, texts=st.lists(TEXTS.filter(bool), min_size=1, max_size=4))
def test_messages(id: str, model: str, texts: list[str]) -> None:
    writer = message_writer({}, id=id, model=model)
    writer.start([stream()])
    first, *rest = texts
    assert writer.text(Chunk(first, (1,))) is None  # The block has to begin.
    begun = writer.chunk(0, Chunk(first, (1,)))
    events = [begun.split(b"\n\n")[1] + b"\n\n"]
    events += [cast(bytes, writer.text(Chunk(text, (1,)))) for text in rest]
    assert events == [
        b"event: content_block_delta\n" + encoded(ContentBlockDelta(0, TextDelta(text)))
        for text in texts
    ]
    assert writer.text(Chunk("", (1,))) == b""
    assert writer.text(Chunk("x", (1,), finish_reason="stop")) is None


@given(model=NAMES, texts=st.lists(TEXTS.filter(bool), max_size=4))
def test_lines(model: str, texts: list[str]) -> None:
    chat = line_writer({}, model=model)
    text = GenerateLines(model=model, started=0.0, wanted=wanted_chat({}))
    for writer in (chat, text):
        writer.start([stream()])
        assert writer.text(Chunk("", (1,))) == b""
        assert writer.text(Chunk("x", (1,), finish_reason="stop")) is None
    for said in texts:
        replies = (
            OllamaChatResponse(
                model=model, created_at=chat.created_at, message=OllamaAnswer(content=said)
            ),
            OllamaGenerateResponse(model=model, created_at=text.created_at, response=said),
        )
        for writer, reply in zip((chat, text), replies, strict=True):
            assert writer.text(Chunk(said, (1,))) == msgspec.json.encode(reply) + b"\n"


def test_lines_that_tell_more_than_text_take_the_long_way() -> None:
    writer = line_writer({"top_logprobs": 0})
    writer.start([stream()])
    assert writer.text(Chunk("x", (1,))) is None
