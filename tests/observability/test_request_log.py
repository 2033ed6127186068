"""The line that each request leaves in the log: sizes, times, and contents only when asked for."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from quart_trio.testing import TrioClient

from tests.support.http_stub import (
    Call,
    Step,
    StubEngine,
    captured_logs,
    client_of,
    http_client,
    served,
    server_config,
)
from tests.support.http_stub import words as said
from trioserve.http import create_app
from trioserve.http.api.access_log import AccessRecord
from trioserve.http.api.contents import MAX_CHARACTERS, MAX_TEXTS, Contents
from trioserve.http.api.jobs import PromptJob
from trioserve.observability.metrics import Metrics
from trioserve.protocol.errors import DeadlineExceeded, EngineError, QueueFull
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import GenerationStream
from trioserve.requests.prompts import ChatPrompt, TextPrompt, TokensPrompt
from trioserve.requests.request import Request, Times
from trioserve.requests.stream import Chunk, Stream, StreamBudget
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
SECRET = "the cat sat"
USER = {"role": "user", "content": "x"}
LETTERS = {"max_tokens": 5, "allowed_token_ids": [65]}


async def lines_of(client: TrioClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the log lines of a request."""
    with captured_logs() as logs:
        response = await client.post(path, json=body)
        await response.get_data(True)
    return logs


async def test_a_line_tells_sizes_and_times(autojump_clock: object) -> None:
    """Let the first of two requests take the only permit for five steps of a second."""
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0), max_num_seqs=1) as engine:
        client: Any = create_app(engine, server_config()).test_client()
        async with engine.generate("x", max_tokens=5) as first:
            await first.receive()
            (line,) = await lines_of(client, TEXT, prompt="hello", max_tokens=3)
    assert line["prompt_tokens"] == 5
    assert line["completion_tokens"] == 3
    assert line["cached_tokens"] == 0
    assert line["n"] == 1
    assert line["queue_ms"] == pytest.approx(4000, abs=1)
    assert line["first_token_ms"] == pytest.approx(5000, abs=1)
    assert line["first_sent_ms"] == pytest.approx(7000, abs=1)
    assert line["duration_ms"] == pytest.approx(7000, abs=1)
    assert line["tokens_per_second"] == 1.0
    assert (line["status"], line["reason"]) == (200, "length")


async def test_a_stream_s_first_output_is_sent_with_its_first_token(
    autojump_clock: object,
) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0)) as engine:
        client: Any = create_app(engine, server_config()).test_client()
        for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": [USER]})):
            (line,) = await lines_of(client, path, **body, **LETTERS, stream=True)
            assert line["first_sent_ms"] == line["first_token_ms"]
            assert line["duration_ms"] == pytest.approx(line["first_token_ms"] + 4000, abs=1)
            assert line["tokens_per_second"] == 1.0


async def test_a_line_names_the_key_and_doesnt_tell_it() -> None:
    client = client_of(StubEngine(), api_key=("zero", SECRET), admin_api_key=("boss",))
    with captured_logs() as logs:
        for key in (SECRET, "boss", "wrong"):
            await client.get("/version", headers={"Authorization": f"Bearer {key}"})
        await client.get("/health")
    assert [line.get("key") for line in logs] == ["key-2", "admin-1", None, None]
    assert SECRET not in json.dumps(logs)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (EngineError("broken"), "WARNING"),
        (DeadlineExceeded("late"), "WARNING"),
        (QueueFull("full"), "INFO"),
    ],
)
async def test_what_fails_on_the_servers_side_is_a_warning(error: Exception, level: str) -> None:
    async def refuse(_: Call) -> None:
        raise error

    (line,) = await lines_of(client_of(StubEngine(admit=refuse)), TEXT, prompt="x")
    assert line["level"] == level


async def test_a_line_tells_who_asked_and_the_callers_trace() -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traceparent = f"00-{trace_id}-b7ad6b7169203331-01"
    headers = [("traceparent", traceparent), ("tracestate", "a=1"), ("tracestate", "b=2")]
    stub = StubEngine()
    with captured_logs() as logs:
        async with served(stub) as url, http_client(url) as client:
            await client.post(TEXT, json={"prompt": "x"}, headers=headers)
            await client.post(TEXT, json={"prompt": "x"}, headers={"traceparent": "nonsense"})
            await client.post(TEXT, json={"prompt": ["x", "y"]})
    traced, nonsense, plain = logs
    assert traced["client"] == plain["client"] == "127.0.0.1"
    assert traced["trace_id"] == trace_id
    assert "trace_id" not in nonsense
    assert "trace_id" not in plain
    assert plain["n"] == 2
    handed_on = [(call.options["traceparent"], call.options["tracestate"]) for call in stub.calls]
    assert handed_on == [(traceparent, "a=1,b=2"), ("nonsense", ""), ("", ""), ("", "")]


def record_of(*streams: tuple[Times, int]) -> AccessRecord:
    record = AccessRecord(method="POST", path=TEXT, request_id="r", started=10.0)
    record.note_streams(
        [
            GenerationStream(
                Request(
                    id="r",
                    prompt=TokensPrompt((1,)),
                    params=SamplingParams(),
                    stream=Stream(StreamBudget(1, 1)),
                    times=times,
                    prompt_ids=[1] * num_prompt,
                )
            )
            for times, num_prompt in streams
        ]
    )
    return record


async def test_of_several_prompts_the_longest_wait_and_the_first_token_count() -> None:
    waited = Times(arrived=10, queued=11, first_scheduled=13, first_token=14)
    quick = Times(arrived=10, queued=11, first_scheduled=11.5, first_token=12)
    unscheduled = Times(arrived=10, queued=11)
    record = record_of((waited, 3), (quick, 4), (unscheduled, 5))
    record.status, record.completed = 200, True
    with captured_logs() as logs:
        record.write(Metrics("m"))
    (line,) = logs
    assert (line["queue_ms"], line["first_token_ms"], line["prompt_tokens"]) == (2000, 2000, 12)


async def test_what_never_ran_has_no_times() -> None:
    record = record_of((Times(arrived=10), 3))
    with captured_logs() as logs:
        record.write(Metrics("m"))
    assert not {"queue_ms", "first_token_ms"} & set(logs[0])


def finishing(*reasons: str) -> StubEngine:
    def script(_: Call) -> list[Step]:
        return [
            Chunk("a", (97,), index=index, finish_reason=reason)
            for index, reason in enumerate(reasons)
        ]

    return StubEngine(script=script)


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (("stop", "stop"), "stop"),
        (("length", "stop", "length"), "length,stop"),
    ],
)
async def test_the_reasons_of_several_outputs(reasons: tuple[str, ...], shown: str) -> None:
    client = client_of(finishing(*reasons))
    (line,) = await lines_of(client, TEXT, prompt="x", n=len(reasons), stream=True)
    assert (line["reason"], line["n"]) == (shown, len(reasons))


BODIES = {
    TEXT: {"prompt": SECRET, "stop": ["|"]},
    CHAT: {"messages": [{"role": "user", "content": SECRET}]},
    "/generate": {"text": SECRET},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_contents_are_logged_only_when_asked_for(path: str, stream: bool) -> None:
    stub = StubEngine(script=lambda _: said("an answer"))
    (plain,) = await lines_of(client_of(stub), path, stream=stream, **BODIES[path])
    assert not {"prompts", "outputs", "sampling"} & set(plain)
    assert SECRET not in json.dumps(plain)
    assert "answer" not in json.dumps(plain)
    asked = client_of(stub, log_requests=True)
    (line,) = await lines_of(asked, path, stream=stream, **BODIES[path])
    assert SECRET in line["prompts"][0]
    assert line["outputs"] == ["an answer"]
    if path == TEXT:
        assert line["sampling"]["stop"] == "('|',)"
        assert line["sampling"]["max_tokens"] == 16


async def test_a_refused_request_is_logged_with_its_prompt() -> None:
    async def admit(_: Call) -> None:
        raise RuntimeError("broken")

    client = client_of(StubEngine(admit=admit), log_requests=True)
    with captured_logs() as logs:
        response = await client.post(TEXT, json={"prompt": SECRET})
    assert response.status_code == 500
    line = logs[-1]
    assert (line["reason"], line["prompts"], line["outputs"]) == ("internal_error", [SECRET], [])


async def test_a_library_logs_no_contents(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with open_fake_engine() as engine:
            completion = await engine.complete(SECRET, max_tokens=40)
    for record in caplog.records:
        assert SECRET not in record.getMessage()
        assert completion.text not in record.getMessage()


class TestContents:
    def job(self, prompt: Any, **params: Any) -> PromptJob:
        return PromptJob(prompt=prompt, params=SamplingParams(**params), request_id="r")

    def test_every_text_is_cut(self) -> None:
        contents = Contents([self.job(TextPrompt("p" * (MAX_CHARACTERS + 1)))])
        contents.add(0, Chunk("a" * (MAX_CHARACTERS - 1)))
        contents.add(0, Chunk("bcd"))
        contents.add(0, Chunk("e" * 10))
        fields: Any = contents.fields()
        (prompt,), (output,) = fields["prompts"], fields["outputs"]
        assert prompt == "p" * MAX_CHARACTERS + f"… ({MAX_CHARACTERS + 1} characters)"
        assert output == "a" * (MAX_CHARACTERS - 1) + f"b… ({MAX_CHARACTERS + 12} characters)"

    def test_one_of_just_the_length_is_whole(self) -> None:
        contents = Contents([self.job(TextPrompt("p" * MAX_CHARACTERS))])
        contents.add(0, Chunk("a" * MAX_CHARACTERS))
        fields: Any = contents.fields()
        assert (fields["prompts"], fields["outputs"]) == (
            ["p" * MAX_CHARACTERS],
            ["a" * MAX_CHARACTERS],
        )

    def test_the_number_of_texts_is_bounded(self) -> None:
        contents = Contents([self.job(TextPrompt(str(index))) for index in range(20)])
        for index in range(20):
            contents.add(0, Chunk("x", index=index))
            contents.add(0, Chunk("y", index=index))
        fields: Any = contents.fields()
        assert fields["prompts"] == [str(index) for index in range(MAX_TEXTS)]
        assert fields["outputs"] == ["xy"] * MAX_TEXTS

    def test_outputs_come_in_the_order_of_prompts(self) -> None:
        contents = Contents([self.job(TextPrompt("a")), self.job(TextPrompt("b"))])
        contents.add(1, Chunk("third"))
        contents.add(0, Chunk("second", index=1))
        contents.add(0, Chunk("first"))
        assert contents.fields()["outputs"] == ["first", "second", "third"]

    def test_other_prompts_are_json(self) -> None:
        messages = ({"role": "user", "content": "hé"},)
        jobs = [self.job(TokensPrompt((1, 2))), self.job(ChatPrompt(messages=messages))]
        assert Contents(jobs).fields()["prompts"] == ["[1,2]", '[{"role":"user","content":"hé"}]']

    def test_only_fields_that_were_set(self) -> None:
        job = self.job(TextPrompt("a"), temperature=0.5, stop=["x" * 1000] * 9, ignore_eos=True)
        sampling: Any = Contents([job]).fields()["sampling"]
        assert set(sampling) == {"temperature", "stop", "ignore_eos"}
        assert (sampling["temperature"], sampling["ignore_eos"]) == (0.5, True)
        assert sampling["stop"].endswith(" characters)")
        assert len(sampling["stop"]) < MAX_CHARACTERS + 40
