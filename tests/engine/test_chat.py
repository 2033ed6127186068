"""The openai client and the whole engine, with a fake worker that says what it is to say."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import httpx
import openai
import trio

from tests.support.http_stub import server_config
from trioserve import Engine
from trioserve.http import create_app, serve_app
from trioserve.protocol.sampling import SamplerParams
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import byte_tokenizer, open_fake_engine

ENCODE = byte_tokenizer().encode
(END,) = ENCODE("\0").ids
"""The token that ends an answer."""
PROMPT_ENDS = ENCODE("assistant:").ids
TOOLS: Any = [{"type": "function", "function": {"name": name}} for name in ("weather", "search")]
OPTIONS: Any = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": TOOLS,
}
THOUGHT = "<think>\nIs it 🌧 there?\n</think>\n\nLet me see.\n"
CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, {}]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "search", "arguments": {"q": "\\"}"}}\n</tool_call>'
)
Result = TypeVar("Result")


def says(*answers: str) -> Callable[[], FakeWorker]:
    """Return a worker that gives these answers, one for each output."""
    tokens = [ENCODE(answer).ids for answer in answers]

    def token(context: list[int], sampler: SamplerParams) -> int:
        size = len(PROMPT_ENDS)
        starts = range(size, len(context) + 1)
        start = max(at for at in starts if context[at - size : at] == PROMPT_ENDS)
        answer, position = tokens[sampler.sequence_index], len(context) - start
        return answer[position] if position < len(answer) else END

    return lambda: FakeWorker(token=token)


@contextlib.asynccontextmanager
async def site(make_worker: Callable[[], FakeWorker]) -> AsyncIterator[tuple[Engine, str]]:
    """Open an engine behind a server with Hermes' calls and reasoning; give its URL."""
    config = server_config(tool_call_parser="hermes", reasoning_parser="think")
    async with open_fake_engine(make_worker, eos_token_ids=(END,)) as engine:
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(serve_app, create_app(engine, config), config)
            yield engine, url
            nursery.cancel_scope.cancel()


async def with_client(url: str, talk: Callable[[openai.OpenAI], Result]) -> Result:
    """Return the result of ``talk``, which runs in a thread: the client knows no trio."""

    def run() -> Result:
        with httpx.Client(trust_env=False, timeout=60) as http:
            return talk(
                openai.OpenAI(base_url=f"{url}/v1", api_key="key", http_client=http, max_retries=0)
            )

    return await trio.to_thread.run_sync(run)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


async def test_calls_and_reasoning_streamed_and_whole() -> None:
    expected = [("weather", '{"city": "Köln", "days": [1, {}]}'), ("search", '{"q": "\\"}"}')]

    def talk(client: openai.OpenAI) -> list[Any]:
        whole = client.chat.completions.create(**OPTIONS).choices[0]
        with client.chat.completions.stream(**OPTIONS) as stream:
            reasoning = "".join(
                getattr(choice.delta, "reasoning_content", None) or ""
                for event in stream
                if event.type == "chunk"
                for choice in event.chunk.choices
            )
            final = stream.get_final_completion().choices[0]
        return [whole, final, reasoning]

    async with site(says(THOUGHT + CALLS)) as (engine, url):
        whole, final, reasoning = await with_client(url, talk)
        engine.check_integrity()
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert calls_of(choice.message) == expected
    assert whole.message.reasoning == reasoning == "Is it 🌧 there?"


async def test_several_answers_streamed_and_whole() -> None:
    answers = (THOUGHT + CALLS, "No.", "<think>Hm.</think>Yes.")

    def talk(client: openai.OpenAI) -> list[Any]:
        whole = client.chat.completions.create(**OPTIONS, n=3)
        with client.chat.completions.stream(**OPTIONS, n=3) as stream:
            final = stream.get_final_completion()
        return [whole.choices, final.choices]

    async with site(says(*answers)) as (engine, url):
        whole, final = await with_client(url, talk)
        engine.check_integrity()
    for choices in (whole, final):
        assert [choice.message.content for choice in choices] == ["Let me see.", "No.", "Yes."]
        assert [len(calls_of(choice.message)) for choice in choices] == [2, 0, 0]
        reasons = [choice.finish_reason for choice in choices]
        assert reasons == ["tool_calls", "stop", "stop"]


async def test_a_stop_string_inside_a_call() -> None:
    """Cut the call as text is cut: the part before the stop string remains."""

    def talk(client: openai.OpenAI) -> Any:
        return client.chat.completions.create(**OPTIONS, stop=["days"]).choices[0]

    async with site(says(CALLS)) as (_, url):
        choice = await with_client(url, talk)
    assert calls_of(choice.message) == [("weather", '{"city": "Köln", "')]
    assert choice.stop_reason == "days"
