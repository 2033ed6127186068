"""Transcripts by tiny Whisper models: what they give is what transformers gives."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

import trioserve
from tests.support.engines import assert_idle, open_tiny_engine, worker_of
from tests.support.http_stub import server_config
from tests.support.model_server import serving_folder
from tests.support.speech_reference import Reference
from tests.support.tiny_speech import make_speech_model, sound, wav
from trioserve import (
    Engine,
    InvalidRequest,
    ModelLoadError,
    RequestAborted,
    open_engine,
)
from trioserve.http import create_app
from trioserve.http.server.server import serve_app
from trioserve.requests.speech.transcript import Transcript

PAGE = Path(__file__).parents[2] / "docs" / "speech.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TWO_FRONT_ENDS = ("--api-server-count", "2", "--device", "cpu", "--dtype", "float32")
CLIPS = [(1, 0.4), (2, 1.0), (3, 0.8), (1, 0.4), (4, 2.3)]
"""Numbers and seconds of clips; the last one has three windows."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speech_model(tmp_path_factory.mktemp("speech"))


async def transcripts(engine: Engine, **options: Any) -> list[Transcript]:
    """Return the transcripts of all clips, made at the same time."""
    found: dict[int, Transcript] = {}

    async def ask(index: int) -> None:
        found[index] = await engine.transcribe(wav(*CLIPS[index]), **options)

    async with trio.open_nursery() as nursery:
        for index in range(len(CLIPS)):
            nursery.start_soon(ask, index)
    return [found[index] for index in range(len(CLIPS))]


def tokens_of(transcript: Transcript) -> list[tuple[int, ...]]:
    return [each.token_ids for each in transcript.segments]


async def test_transcripts_are_those_of_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, in chunks and preempted, with cached pages, and after the worker was killed."""
    monkeypatch.chdir(tmp_path)
    reference = Reference(folder)
    options = {"block_size": 4, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 30}
    async with open_tiny_engine(folder, **options) as engine:
        first = await transcripts(engine, language="de", temperature=0)
        if not engine.statistics().scheduler.num_preemptions:
            # The encoder states came one by one. They are kept, so now the windows come together.
            first = await transcripts(engine, language="de", temperature=0)
        for clip, transcript in zip(CLIPS, first, strict=True):
            reference.check_windows(transcript, sound(*clip))
        assert engine.statistics().scheduler.num_preemptions > 0
        follow = {"temperature": 0, "condition_on_previous_text": True}
        followed = await engine.transcribe(wav(*CLIPS[4]), language="de", **follow)
        reference.check_windows(followed, sound(*CLIPS[4]), is_conditioned=True)
        assert tokens_of(followed) != tokens_of(first[4])
        assert tokens_of(first[0]) == tokens_of(first[3])
        assert first[0].text != first[1].text
        process = await worker_of(engine)
        heard: list[str] = []

        async def kill(text: str) -> None:
            if not heard:
                os.kill(process.pid, signal.SIGKILL)
            heard.append(text)

        again = await engine.transcribe(wav(*CLIPS[4]), language="de", on_text=kill)
        assert tokens_of(again) == tokens_of(first[4])
        assert "".join(heard) == again.text == first[4].text
        assert (await worker_of(engine)).pid != process.pid
        await assert_idle(engine)
        await assert_detects(engine, reference)
        await assert_times(engine, reference)
        await assert_refused(engine)
        await assert_served(engine)
        monkeypatch.setattr(
            trioserve, "open_engine", lambda *_, **__: contextlib.nullcontext(engine)
        )
        await assert_page_runs()
        await assert_ends(engine)


async def assert_detects(engine: Engine, reference: Reference) -> None:
    """Assert that detected languages are transformers', and that options change the text."""
    for number, seconds in CLIPS[:3]:
        transcript = await engine.transcribe(wav(number, seconds), temperature=0)
        features = reference.features(sound(number, seconds))
        token = reference.model.detect_language(input_features=features)
        assert reference.model.generation_config.lang_to_id[f"<|{transcript.language}|>"] == token
    clip = wav(*CLIPS[1])
    french = functools.partial(engine.transcribe, clip, language="fr", temperature=0)
    plain = await french()
    assert plain.text != (await french(task="translate")).text
    assert plain.text != (await french(prompt="Once upon")).text
    await assert_idle(engine)


async def assert_times(engine: Engine, reference: Reference) -> None:
    """Assert that words have the times of their tokens, and that these are transformers'."""
    assert engine.transcriber is not None
    config = engine.transcriber.reader.config
    language = (config.languages["de"], config.tasks["transcribe"])
    before = (config.start_token, *language, config.no_timestamps_token)
    for clip in CLIPS[:3]:
        found = await engine.transcribe(
            wav(*clip), language="de", temperature=0, word_timestamps=True
        )
        (segment,) = found.segments
        text = [token for token in segment.token_ids if token < config.end_token]
        times = await engine.transcriber.reader.token_times(sound(*clip), 0.0, before, text, "x")
        assert times == pytest.approx(reference.token_times(sound(*clip), before, text))
        assert times[0] < times[-1]
        assert "".join(word.text for word in found.words) == segment.text
        bounds = [time for word in found.words for time in (word.start, word.end)]
        assert bounds == sorted(bounds)
        assert {round(time, 3) for time in times} >= set(bounds[1:])


async def assert_refused(engine: Engine) -> None:
    transcribe, clip = engine.transcribe, wav(1, 0.1)
    calls: list[tuple[Callable[[], Awaitable[Any]], str, str]] = [
        (lambda: transcribe(b"no audio"), "unknown format", "audio"),
        (lambda: transcribe(clip, language="xx"), "de, en, fr", "language"),
        (lambda: transcribe(clip, temperature=-1), "temperature", "temperature"),
        (lambda: transcribe(3), "audio must be", "audio"),
        (lambda: engine.complete("text"), "it transcribes speech", "model"),
        (lambda: engine.embed("text"), "it transcribes speech", "model"),
        (lambda: engine.score("text", "text"), "it transcribes speech", "model"),
    ]
    for call, told, param in calls:
        with pytest.raises(InvalidRequest) as refused:
            await call()
        assert told in str(refused.value)
        assert refused.value.param == param
    await assert_idle(engine)


def run(program: str) -> dict[str, Any]:
    """Run a program of the documentation; return its names."""
    names: dict[str, Any] = {}
    exec(program, names)
    return names


async def assert_page_runs() -> None:
    """Assert that the page's second program runs as it stands, over this engine."""
    await run(PROGRAMS[1].removesuffix("trio.run(main)\n"))["main"]()


async def assert_served(engine: Engine) -> None:
    """Assert that OpenAI's client gets over HTTP what the engine gives."""
    clip, config = wav(7, 1.1), server_config()
    wanted = await engine.transcribe(clip, language="de", temperature=0)
    short = wav(7, 0.2)
    tried = await engine.transcribe(short, language="de")
    # A model of random numbers is never sure.
    assert [each.temperature for each in tried.segments] == [1.0]
    timed = await engine.transcribe(clip, language="de", timestamps=True, temperature=0)
    english = await engine.transcribe(clip, task="translate", temperature=0)
    spoken = await engine.transcribe(
        clip, language="de", timestamps=True, word_timestamps=True, temperature=0
    )
    assert len(spoken.segments) == len(timed.segments)
    times = [time for each in timed.segments for time in (each.start, each.end)]
    assert times == sorted(times)
    assert times[-1] <= timed.duration

    def ask(url: str) -> None:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model, file = client.models.list().data[0].id, ("speech.wav", clip)
        Path("speech.wav").write_bytes(short)
        program = PROGRAMS[0].replace("http://127.0.0.1:8000", url).replace("whisper-small", model)
        assert run(program)["found"].text
        create = client.audio.transcriptions.create
        found = create(model=model, file=("speech.wav", short), language="de")
        assert found.text == tried.text
        found = create(model=model, file=file, language="de", temperature=0)
        assert found.text == wanted.text
        asked: dict[str, Any] = {
            **{"model": model, "file": file, "language": "de", "temperature": 0},
            "response_format": "verbose_json",
        }
        verbose = create(**asked, timestamp_granularities=["segment"])
        segments = [(each.start, each.end, each.text) for each in verbose.segments or ()]
        assert segments == [(each.start, each.end, each.text) for each in timed.segments]
        assert (verbose.duration, verbose.language) == (pytest.approx(1.1), "de")
        assert verbose.words is None
        worded = create(**asked, timestamp_granularities=["word"])
        words = [(each.start, each.end, each.word) for each in worded.words or ()]
        assert words == [(each.start, each.end, each.text.strip()) for each in spoken.words]
        assert (len(words) > 1, worded.segments) == (True, None)
        events: list[Any] = list(create(model=model, file=file, language="de", stream=True))
        assert events[-1].text == wanted.text
        assert "".join(each.delta for each in events[:-1]) == wanted.text
        data = {"temperature": "0"}
        translated = httpx.post(f"{url}/v1/audio/translations", files={"file": file}, data=data)
        assert translated.json()["text"] == english.text
        with pytest.raises(openai.BadRequestError) as refused:
            create(model=model, file=("speech.wav", b"ID3 and no audio"))
        assert (refused.value.param, "file: " in str(refused.value)) == ("file", True)
        with pytest.raises(openai.BadRequestError, match="it transcribes speech"):
            client.completions.create(model=model, prompt="text")
        assert httpx.get(f"{url}/health_generate").status_code == 200

    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        await trio.to_thread.run_sync(ask, url)
        nursery.cancel_scope.cancel()
    await assert_idle(engine)


async def assert_ends(engine: Engine) -> None:
    """Assert that aborted and cancelled transcripts end, and that one goes on in a drain."""
    begun = trio.Event()

    async def note(text: str) -> None:
        begun.set()

    async def ask(name: str) -> None:
        with pytest.raises(RequestAborted):
            await engine.transcribe(wav(6, 20.0), request_id=name, on_text=note)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "speech")
        await begun.wait()
        assert engine.abort("speech") == 1
    with trio.move_on_after(0.3):
        await engine.transcribe(wav(6, 20.0))
        raise AssertionError("20 windows took less than 0.3 s")
    await assert_idle(engine)

    async def drain(text: str) -> None:
        engine.drain()

    assert (await engine.transcribe(wav(6, 2.5), on_text=drain)).duration == 2.5
    await engine.wait_idle()


async def test_front_ends_transcribe(folder: Path) -> None:
    clip = wav(7, 1.1)
    async with open_tiny_engine(folder, dtype="float32") as engine:
        wanted = await engine.transcribe(clip, language="de", temperature=0)
        spoken = await engine.transcribe(
            clip, language="de", temperature=0, timestamps=True, word_timestamps=True
        )

    def ask() -> None:
        with serving_folder(folder, *TWO_FRONT_ENDS) as url:
            for _ in range(4):
                # Each comes by a connection of its own, and any front end may accept it.
                reply = httpx.post(
                    f"{url}/v1/audio/transcriptions",
                    files={"file": ("speech.wav", clip)},
                    data={"model": "the-model", "language": "de", "temperature": "0"},
                    timeout=60,
                )
                assert reply.json()["text"] == wanted.text
            metrics = httpx.get(f"{url}/metrics", timeout=60).text
            assert re.search(r"^trioserve:mm_encode_seconds_count{.*} 2\.0$", metrics, re.M)
            reply = httpx.post(
                f"{url}/v1/audio/transcriptions",
                files={"file": ("speech.wav", clip)},
                data={
                    "language": "de",
                    "temperature": "0",
                    "response_format": "verbose_json",
                    "timestamp_granularities[]": "word",
                },
                timeout=60,
            )
            words = [(each["start"], each["end"]) for each in reply.json()["words"]]
            assert words == [(each.start, each.end) for each in spoken.words]

    await trio.to_thread.run_sync(ask)


async def test_without_a_tokenizer_a_model_isnt_served(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="--skip-tokenizer-init"):
        async with open_engine(str(folder), device="cpu", skip_tokenizer_init=True):
            raise AssertionError("it was loaded")
