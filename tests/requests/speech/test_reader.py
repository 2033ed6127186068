"""The times of a window's tokens: what a worker is asked, again if it or the states are lost."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from tests.support.tiny_speech import CONFIG
from trioserve.observability.metrics import Metrics
from trioserve.protocol.errors import CallFailed, EngineError, WorkerLost
from trioserve.requests.media.encoder import MAX_TRIES, WorkerMediaEncoder
from trioserve.requests.media.encoding import EncoderClient
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.media.reader import MediaReader, ProcessedMedia
from trioserve.requests.speech.reader import RATE, SpeechReader

ROWS = np.ones((CONFIG.num_states, CONFIG.width), np.float32).tobytes()
BEFORE, TEXT = (31, 32, 35, 40), (7, 8, 9)
SAMPLES = np.zeros(round(0.65 * RATE), np.float32)
"""Audio of two windows, of 0.4 and 0.25 seconds."""


class Reader:
    """A reader of windows; their lengths are their content."""

    async def read(self, part: AudioPart, *, name: str) -> ProcessedMedia:
        content: Any = part.source
        digest = b"%016d" % len(content.data)
        return ProcessedMedia("audio", digest, [], {"x": np.ones(3)}, CONFIG.num_states)


class Worker:
    """A worker that notes its calls, and raises what is in ``errors`` at those that align."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[str] = []
        self.asked: list[Any] = []

    async def call(self, name: str, arguments: Any) -> Any:
        self.calls.append(name)
        await trio.lowlevel.checkpoint()
        if name == "encode_media":
            return {"rows": ROWS, "number_format": "float32"}
        self.asked.append(arguments)
        if self.errors:
            raise self.errors.pop(0)
        return [0, 3, 5, 10]


def speech_reader(worker: Worker, max_bytes: int = 1 << 20) -> SpeechReader:
    encoder = WorkerMediaEncoder(
        call=worker.call,
        wait_attached=trio.lowlevel.checkpoint,
        count_workers=lambda: 1,
        max_bytes=max_bytes,
        metrics=Metrics("m"),
    )
    client = EncoderClient(encoder)
    return SpeechReader(reader=cast(MediaReader, Reader()), client=client, config=CONFIG)


async def test_a_worker_is_asked_for_the_text_with_what_frames_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    worker = Worker()
    reader = speech_reader(worker)
    for start in (0.0, 0.4):
        times = await reader.token_times(SAMPLES, start, BEFORE, TEXT, "audio")
        assert times == pytest.approx([0.0, 0.06, 0.1, 0.2])
    asked = {
        "tokens": [*BEFORE, *TEXT, CONFIG.end_token],
        "num_before": 3,
        "rows": ROWS,
        "number_format": "float32",
    }
    assert worker.asked == [{**asked, "num_frames": 20}, {**asked, "num_frames": 12}]
    await reader.token_times(SAMPLES, 0.64, BEFORE, TEXT, "audio")
    assert worker.asked[-1]["num_frames"] == 1  # 10 ms are less than a frame
    await reader.token_times(SAMPLES, 0.0, BEFORE, TEXT, "audio")
    assert worker.calls.count("encode_media") == 3
    again = Worker()
    for _ in range(2):  # Nothing is kept: the states are computed anew.
        await speech_reader(again, max_bytes=0).token_times(SAMPLES, 0.0, BEFORE, TEXT, "audio")
    assert again.calls == ["encode_media", "align_speech"] * 2


async def test_lost_workers_and_errors(autojump_clock: trio.testing.MockClock) -> None:
    lost = [WorkerLost("lost") for _ in range(MAX_TRIES - 1)]
    worker = Worker(*lost)
    await speech_reader(worker).token_times(SAMPLES, 0.0, BEFORE, TEXT, "audio")
    assert worker.calls == ["encode_media", *["align_speech"] * MAX_TRIES]
    for errors, told in (
        ([*lost, WorkerLost("lost")], f"{MAX_TRIES} workers were lost"),
        ([CallFailed("align_speech", "no memory")], "align_speech: no memory"),
    ):
        with pytest.raises(EngineError, match=told):
            await speech_reader(Worker(*errors)).token_times(SAMPLES, 0.0, BEFORE, TEXT, "audio")
