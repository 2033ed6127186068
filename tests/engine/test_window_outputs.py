"""The outputs of windows: which are taken, which are tried again, and what precedes the next."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import attrs
import numpy as np
import pytest
import trio

from tests.support.tiny_speech import CONFIG
from trioserve.engine.transcribing import Transcriber
from trioserve.model_files.speech_config import SpeechConfig
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.deadline import Deadline
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.generation import Usage
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.options import RequestOptions
from trioserve.requests.speech.reader import RATE, SpeechReader
from trioserve.requests.speech.tasks import SpeechOptions
from trioserve.requests.speech.transcript import Transcript
from trioserve.requests.stream import Chunk, TokenLogprob

T = CONFIG.first_timestamp
HEAD = (CONFIG.start_token, CONFIG.languages["en"], CONFIG.tasks["transcribe"])
PLAIN = (*HEAD, CONFIG.no_timestamps_token)
MAX_MODEL_LEN = 20
"""So that at most nine tokens precede a window."""


@attrs.frozen
class Output:
    """A window's output as the fake model gives it."""

    tokens: Sequence[int]
    logprob: float = -0.5
    """Log-probability of each token."""
    silence: float = 0.1
    """Probability of silence."""


GOOD = Output([6, 7, 8])
UNSURE = Output([9, 10], logprob=-1.5)
REPEATED = Output([11] * 100)
SILENT = Output([12, 13], logprob=-1.5, silence=0.7)


class Tokenizer:
    """A tokenizer of letters, of which token 0 is the A."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + id) for id in ids)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) - ord("A") for letter in text.strip()]


class Columns:
    """The log-probabilities of a prompt behind its start."""

    def __init__(self, entries: list[TokenLogprob]) -> None:
        self._entries = entries

    def entries(self, prompt_ids: list[int]) -> list[TokenLogprob]:
        return self._entries


@attrs.frozen
class Stream:
    """The stream of one request: one chunk."""

    output: Output
    prompt_logprobs: Columns | None
    usage: Usage = attrs.field(factory=lambda: Usage(1, 1, 0))

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        await trio.lowlevel.checkpoint()
        ids = (*self.output.tokens, CONFIG.end_token)
        yield Chunk(
            index=0,
            text="",
            token_ids=ids,
            logprobs=tuple(self.entry(id, self.output.logprob) for id in ids),
            finish_reason="stop",
        )

    def entry(self, token: int, logprob: float) -> TokenLogprob:
        asked = (CONFIG.no_speech_token, math.log(self.output.silence), "")
        return TokenLogprob(token, logprob, "", asked=(asked,))


@attrs.define
class Model:
    """A model with an output for each request, in order; it notes what it is asked."""

    outputs: list[Output]
    seconds: float = 0.3
    config: SpeechConfig = CONFIG
    prompts: list[tuple[int, ...]] = attrs.field(init=False, factory=list)
    asked: list[SamplingParams] = attrs.field(init=False, factory=list)

    async def read(self, part: AudioPart, name: str) -> Any:
        await trio.lowlevel.checkpoint()
        return np.zeros(round(self.seconds * RATE), np.float32)

    async def prompt(self, samples: Any, start: float, token_ids: Any, name: str) -> Any:
        await trio.lowlevel.checkpoint()
        return token_ids

    @contextlib.asynccontextmanager
    async def open(
        self, prompt: SpeechPrompt, sampling: SamplingParams, *_: Any
    ) -> AsyncIterator[Any]:
        ids = cast("tuple[int, ...]", prompt)
        self.prompts.append(ids)
        self.asked.append(sampling)
        stream = Stream(self.outputs.pop(0), None)
        if sampling.prompt_logprobs is not None:
            start = sampling.prompt_logprobs_start
            assert ids[start - 1] == CONFIG.start_token
            entries = [stream.entry(id, -9.0) for id in ids[start:]]
            stream = attrs.evolve(stream, prompt_logprobs=Columns(entries))
        yield stream

    async def transcribe(self, on_text: Any = None, **options: Any) -> Transcript:
        by = Transcriber(
            reader=cast(SpeechReader, self),
            tokenizer=cast(Any, Tokenizer()),
            max_model_len=MAX_MODEL_LEN,
            open_window=cast(Any, self.open),
            at_a_time=trio.CapacityLimiter(1),
            max_waiting=1,
        )
        given = SpeechOptions(**{"language": "en", **options})
        found = await by.transcribe(
            AudioPart(b"RIFF"), given, RequestOptions(), Deadline(math.inf, ""), on_text
        )
        assert not self.outputs
        return found

    @property
    def temperatures(self) -> list[float]:
        return [each.temperature for each in self.asked]


async def ignore(text: str) -> None:
    await trio.lowlevel.checkpoint()


async def test_windows_are_tried_until_an_output_is_plausible() -> None:
    model = Model([REPEATED, UNSURE, GOOD])
    (segment,) = (await model.transcribe()).segments
    assert model.temperatures == [0.0, 0.2, 0.4]
    assert [each.seed for each in model.asked] == [0, 1, 2]
    assert (segment.text, segment.temperature) == ("GHI", 0.4)
    assert segment.average_logprob == pytest.approx(-0.5)
    assert segment.no_speech_prob == pytest.approx(0.1)
    assert segment.compression_ratio < 1
    model = Model([UNSURE] * 5 + [REPEATED])
    (segment,) = (await model.transcribe()).segments
    assert model.temperatures == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert (segment.text, segment.temperature) == ("L" * 100, 1.0)
    assert segment.compression_ratio > 2.4


async def test_silence_is_left_out() -> None:
    model = Model([SILENT, GOOD], seconds=0.7)
    found = await model.transcribe()
    assert model.temperatures == [0.0, 0.0]
    assert [(each.text, each.start) for each in found.segments] == [("GHI", 0.4)]
    # Timestamps without a word of English: the first output's entry has the probability.
    english = attrs.evolve(CONFIG, languages={}, tasks={})
    model = Model([SILENT], config=english)
    assert (await model.transcribe(timestamps=True)).text == ""
    assert model.prompts == [(CONFIG.start_token,)]


@pytest.mark.parametrize("output", [UNSURE, REPEATED, SILENT])
async def test_a_given_temperature_and_a_stream_have_one_try(output: Output) -> None:
    for options in ({"temperature": 0.3}, {"temperature": 0.0}, {"on_text": ignore}):
        model = Model([output])
        found = await model.transcribe(**options)
        assert model.temperatures == [options.get("temperature", 0.0)]
        assert model.asked[0].seed is None
        assert found.text == Tokenizer().decode(output.tokens)
    # With timestamps, text is told when it is known.
    model = Model([UNSURE, GOOD])
    assert (await model.transcribe(on_text=ignore, timestamps=True)).text == "GHI"


async def test_text_so_far_precedes_the_next_window() -> None:
    spoken = [Output([T, 1, 2, T + 5, T + 5, 3, T + 9, T + 9]), Output([T, 4, 5, T + 9])]
    before = CONFIG.previous_text_token
    for is_on in (False, True):
        model = Model(list(spoken), seconds=0.5)
        await model.transcribe(
            timestamps=True, condition_on_previous_text=is_on, prompt="ZYX", language="en"
        )
        heard = [T, 1, 2, T + 5, T + 5, 3, T + 9]
        given = [25, 24, 23, *heard][-9:] if is_on else [25, 24, 23]
        assert model.prompts == [(before, 25, 24, 23, *HEAD), (before, *given, *HEAD)]


@pytest.mark.parametrize("options", [{"temperature": 0.6}, {}])
async def test_unsure_text_precedes_no_window(options: dict[str, Any]) -> None:
    tries = [GOOD] if options else [UNSURE] * 3 + [GOOD]
    model = Model([*tries, GOOD], seconds=0.7)
    await model.transcribe(condition_on_previous_text=True, **options)
    assert model.prompts[-1] == PLAIN
    model = Model([GOOD, GOOD], seconds=0.7)
    await model.transcribe(condition_on_previous_text=True)
    assert model.prompts[-1] == (CONFIG.previous_text_token, *GOOD.tokens, *PLAIN)
