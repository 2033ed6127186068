"""Forms with audio over HTTP: what is read, what is refused, and the formats of the answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import trio
from openai.types.audio import TranscriptionSegment, TranscriptionWord

from tests.support.fake_transcriber import TRANSCRIPT, FakeTranscriber
from tests.support.http_stub import http_client, server_config
from trioserve.http import create_app
from trioserve.http.api.openai.audio.schemas import TranscriptionForm
from trioserve.http.api.schema.forms import MAX_FIELD_BYTES, MAX_PARTS, parse_form
from trioserve.http.api.schema.ignored_fields import IgnoredFields
from trioserve.http.server.server import serve_app
from trioserve.protocol.errors import InvalidRequest, WorkerLost
from trioserve.requests.speech.tasks import SpeechOptions
from trioserve.testing.fake_engine import open_fake_engine

TRANSCRIPTS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
AUDIO = b"RIFF\0the audio\r\n--of bytes"


@contextlib.asynccontextmanager
async def audio_client(
    fake: FakeTranscriber | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server whose engine transcribes with ``fake``, or not at all."""
    config = server_config(**options)
    async with open_fake_engine() as engine, trio.open_nursery() as nursery:
        engine.transcriber = fake  # type: ignore[assignment]
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        async with http_client(url) as client:
            yield client
        nursery.cancel_scope.cancel()


def form(*fields: tuple[str, str], file: bytes | None = AUDIO) -> list[tuple[str, Any]]:
    """Return the parts of a form, as the client takes them."""
    parts: list[tuple[str, Any]] = [(name, (None, value)) for name, value in fields]
    return parts if file is None else [*parts, ("file", ("speech.wav", file, "audio/wav"))]


async def test_formats_of_answers() -> None:
    fake = FakeTranscriber()
    async with audio_client(fake) as client:
        found = {
            format: await client.post(TRANSCRIPTS, files=form(("response_format", format)))
            for format in ("json", "text", "srt", "vtt", "verbose_json")
        }
        plain = await client.post(TRANSCRIPTS, files=form(("temperature", "0.5")))
    assert {response.status_code for response in found.values()} == {200}
    usage = {"type": "duration", "seconds": 3663}
    short = {"text": TRANSCRIPT.text, "usage": usage}
    assert plain.json() == found["json"].json() == short
    assert found["text"].text == "Hello there. A --> B\n"
    assert found["text"].headers["Content-Type"] == "text/plain; charset=utf-8"
    assert found["srt"].text == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.\n\n"
        "2\n01:01:01,250 --> 01:01:02,000\nA -> B\n\n"
    )
    assert found["vtt"].text == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there.\n\n"
        "01:01:01.250 --> 01:01:02.000\nA -> B\n\n"
    )
    assert found["vtt"].headers["Content-Type"] == "text/vtt; charset=utf-8"
    verbose = found["verbose_json"].json()
    segments = verbose.pop("segments")
    assert verbose == {**short, "task": "transcribe", "language": "en", "duration": 3662.1}
    assert set(segments[0]) == set(TranscriptionSegment.model_fields)
    assert segments[1]["tokens"] == [7]
    assert (segments[1]["id"], segments[1]["seek"]) == (1, 366_000)
    assert segments[0]["avg_logprob"] == -0.25
    assert [each["no_speech_prob"] for each in segments] == [0.125, 0.25]
    assert [each["temperature"] for each in segments] == [0.4, 0.0]
    timed = [options.timestamps for _, options, _ in fake.asked]
    assert timed == [False, False, True, True, True, False]
    assert {source for source, _, _ in fake.asked} == {AUDIO}
    assert fake.asked[-1][1] == SpeechOptions(temperature=0.5)


async def test_times_of_words() -> None:
    fake = FakeTranscriber()
    found: dict[str, Any] = {}
    async with audio_client(fake) as client:
        for kinds in ("segment", "word", "segment word"):
            fields = [("timestamp_granularities[]", kind) for kind in kinds.split()]
            verbose = form(("response_format", "verbose_json"), *fields)
            found[kinds] = (await client.post(TRANSCRIPTS, files=verbose)).json()
    assert [options.word_timestamps for _, options, _ in fake.asked] == [False, True, True]
    assert all(options.timestamps for _, options, _ in fake.asked)
    assert set(found["word"]["words"][0]) == set(TranscriptionWord.model_fields)
    assert "words" not in found["segment"]
    assert "segments" not in found["word"]
    assert found["segment word"]["segments"] == found["segment"]["segments"]
    assert found["segment word"]["words"] == found["word"]["words"]
    assert found["word"]["words"] == [
        {"word": "Hello", "start": 0.25, "end": 1.5},
        {"word": "there.", "start": 1.5, "end": 2.5},
        {"word": "A --> B", "start": 3661.5, "end": 3662.0},
    ]
    assert TRANSCRIPT.words == (*TRANSCRIPT.segments[0].words, *TRANSCRIPT.segments[1].words)


async def test_fields_reach_the_engine() -> None:
    fake = FakeTranscriber()
    async with audio_client(fake) as client:
        fields = (("language", "de"), ("prompt", "Über 100 €"), ("model", "fake"))
        follow = ("condition_on_previous_text", "true")
        (model,) = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
        fields = (*fields[:2], ("model", model))
        headers = {"X-Request-Id": "mine"}
        await client.post(TRANSCRIPTS, files=form(*fields), headers=headers)
        await client.post(
            TRANSCRIPTS,
            files=form(
                ("timestamp_granularities[]", "segment"), ("response_format", "verbose_json")
            ),
        )
        response = await client.post(
            TRANSLATIONS, files=form(("prompt", "x"), ("response_format", "verbose_json"), follow)
        )
    assert response.json()["task"] == "translate"
    assert [options for _, options, _ in fake.asked] == [
        SpeechOptions(language="de", prompt="Über 100 €"),
        SpeechOptions(timestamps=True),
        SpeechOptions(
            task="translate", prompt="x", timestamps=True, condition_on_previous_text=True
        ),
    ]
    assert fake.asked[0][2] == "transcribe-mine"


@pytest.mark.parametrize(
    ("path", "files", "status", "param", "told"),
    [
        (TRANSCRIPTS, form(file=b"noise"), 400, "file", "file: the audio has an unknown"),
        (TRANSCRIPTS, form(("model", "x"), file=None), 400, "file", "exactly one file"),
        (TRANSCRIPTS, form(("file", "text"), file=None), 400, "file", "with a filename"),
        (TRANSCRIPTS, [*form(), *form()], 400, "file", "exactly one file, got 2"),
        (TRANSCRIPTS, [*form(), ("other", ("x", b"y"))], 400, "other", "other"),
        (TRANSCRIPTS, form(("model", "another")), 404, "model", "isn't served here"),
        (TRANSCRIPTS, form(("colour", "red")), 400, "colour", "colour"),
        (TRANSCRIPTS, form(("temperature", "2")), 400, "temperature", "temperature"),
        (TRANSCRIPTS, form(("temperature", "hot")), 400, "temperature", "temperature"),
        (TRANSCRIPTS, form(("response_format", "xml")), 400, "response_format", "vtt"),
        (
            TRANSCRIPTS,
            form(("timestamp_granularities[]", "word")),
            400,
            "timestamp_granularities",
            "verbose_json",
        ),
        (
            TRANSCRIPTS,
            form(("timestamp_granularities[]", "sentence"), ("response_format", "verbose_json")),
            400,
            "timestamp_granularities[0]",
            "sentence",
        ),
        (
            TRANSCRIPTS,
            form(("timestamp_granularities[]", "word"), ("stream", "true")),
            400,
            "timestamp_granularities",
            "verbose_json",
        ),
        (
            TRANSLATIONS,
            form(("timestamp_granularities[]", "word"), ("response_format", "verbose_json")),
            400,
            "timestamp_granularities[]",
            "timestamp_granularities",
        ),
        (
            TRANSCRIPTS,
            form(("timestamp_granularities[]", "segment")),
            400,
            "timestamp_granularities",
            "verbose_json",
        ),
        (TRANSCRIPTS, form(("chunking_strategy", "auto")), 400, "chunking_strategy", "voices"),
        (TRANSCRIPTS, form(("stream", "true"), ("response_format", "srt")), 400, "stream", "srt"),
        (TRANSLATIONS, form(("language", "de")), 400, "language", "language"),
        (TRANSLATIONS, form(("prompt", "x" * (MAX_FIELD_BYTES + 1))), 400, None, "512"),
        (TRANSLATIONS, form(*[("model", "x")] * MAX_PARTS), 400, None, f"{MAX_PARTS} parts"),
    ],
)
async def test_refusals(path: str, files: Any, status: int, param: str | None, told: str) -> None:
    async with audio_client(FakeTranscriber()) as client:
        response = await client.post(path, files=files)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert told.replace("512", str(MAX_FIELD_BYTES)) in error["message"]


async def test_bodies_that_are_no_forms() -> None:
    kind = "multipart/form-data; boundary=b"
    part = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nRIFF\r\n--b--\r\n'
    )
    async with audio_client(FakeTranscriber(), allowed_origins=["https://example.org"]) as client:
        for headers, content, status in (
            ({"Content-Type": kind}, part, 200),
            ({"Content-Type": kind}, part[:-6], 400),
            ({"Content-Type": kind}, b"", 400),
            ({"Content-Type": kind}, b"\xff" * 9, 400),
            ({"Content-Type": "multipart/form-data"}, part, 415),
            ({"Content-Type": "application/json"}, b"{}", 415),
            ({}, part, 415),
            ({"Content-Type": kind, "Content-Encoding": "gzip"}, part, 415),
            # Pages of other origins could send forms without asking before.
            ({"Content-Type": kind, "Origin": "https://evil.example"}, part, 415),
            ({"Content-Type": kind, "Origin": "https://example.org"}, part, 200),
        ):
            response = await client.post(TRANSCRIPTS, headers=headers, content=content)
            assert response.status_code == status, (headers, content, response.text)
        assert "multipart/form-data" in response.text or response.status_code == 200


async def test_models_of_other_tasks() -> None:
    async with audio_client() as client:
        for path in (TRANSCRIPTS, TRANSLATIONS):
            response = await client.post(path, files=form())
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported_task")
            assert "generates text" in error["message"]


def events_of(text: str) -> list[Any]:
    """Return the data of the events in a stream, without keep-alives."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line[:5] == "data:"]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_streams() -> None:
    fake = FakeTranscriber(silence=0.3)
    files = form(("stream", "true"))
    async with audio_client(fake, keep_alive_interval=0.1) as client:
        response = await client.post(TRANSCRIPTS, files=files)
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert ": keep-alive" in response.text
        *pieces, done, last = events_of(response.text)
        assert [each["delta"] for each in pieces] == ["Hello there.", " A --> B"]
        assert {each["type"] for each in pieces} == {"transcript.text.delta"}
        usage = {"type": "tokens", "input_tokens": 8, "output_tokens": 3, "total_tokens": 11}
        assert done == {"type": "transcript.text.done", "text": TRANSCRIPT.text, "usage": usage}
        assert last == "[DONE]"
        refused = await client.post(TRANSCRIPTS, files=form(("stream", "true"), file=b"noise"))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "file"
        fake.error = WorkerLost("the worker was lost")
        failed = events_of((await client.post(TRANSCRIPTS, files=files)).text)
        assert failed[0]["delta"] == "Hello there."
        assert failed[-1]["error"]["code"] == "no_worker"
        fake.error, fake.silence = None, 60.0
        async with client.stream("POST", TRANSCRIPTS, files=files) as response:
            async for _ in response.aiter_bytes():
                break
        with trio.fail_after(5):
            while not fake.is_cancelled:
                await trio.sleep(0.01)


def test_unknown_fields_may_be_ignored() -> None:
    boundary = "b"
    fields = {"colour": "red", "language": "en", "shape[]": "round"}
    body = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    body += (
        '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nRIFF\r\n--b--\r\n'
    )
    ignored = IgnoredFields()
    found = parse_form(TranscriptionForm, body.encode(), boundary, ignored)
    assert (found.language, found.file) == ("en", b"RIFF")
    with pytest.raises(InvalidRequest, match="colour"):
        parse_form(TranscriptionForm, body.encode(), boundary)
