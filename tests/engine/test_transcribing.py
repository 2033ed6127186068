"""The transcripts that are made at a time, and those that wait."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing

from tests.support.tiny_speech import CONFIG
from trioserve.engine.transcribing import Transcriber
from trioserve.protocol.errors import DeadlineExceeded, QueueFull
from trioserve.requests.deadline import Deadline
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.options import RequestOptions
from trioserve.requests.speech.reader import SpeechReader
from trioserve.requests.speech.tasks import SpeechOptions
from trioserve.requests.speech.transcript import Transcript

SECONDS = 10.0
"""Time that a file takes to read. It has no audio, so nothing else is done."""


class Reader:
    config = CONFIG
    num_reading = 0

    async def read(self, part: AudioPart, name: str) -> Any:
        self.num_reading += 1
        assert self.num_reading <= 2
        await trio.sleep(SECONDS)
        self.num_reading -= 1
        return np.zeros(0, np.float32)


def transcriber(max_waiting: int) -> Transcriber:
    return Transcriber(
        reader=cast(SpeechReader, Reader()),
        tokenizer=cast(Any, None),
        max_model_len=96,
        open_window=cast(Any, None),
        at_a_time=trio.CapacityLimiter(2),
        max_waiting=max_waiting,
    )


async def ask(by: Transcriber, deadline: float = math.inf) -> Transcript:
    return await by.transcribe(
        AudioPart(b"RIFF"),
        SpeechOptions(language="en"),
        RequestOptions(),
        Deadline(deadline, "late"),
    )


async def test_a_few_are_made_at_a_time(autojump_clock: trio.testing.MockClock) -> None:
    by = transcriber(max_waiting=3)
    begun = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask, by)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(QueueFull, match="3 transcripts wait"):
            await ask(by)
    assert trio.current_time() - begun == pytest.approx(3 * SECONDS)
    assert (await ask(by)).text == ""


async def test_waiting_counts_for_the_deadline(autojump_clock: trio.testing.MockClock) -> None:
    by = transcriber(max_waiting=3)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask, by)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded, match="late"):
            await ask(by, trio.current_time() + SECONDS / 2)
        assert by.at_a_time.statistics().tasks_waiting == 0
