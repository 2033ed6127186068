"""Transcripts by an engine: windows of audio, each computed as a request of its own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

from trioserve.protocol.errors import InvalidRequest, QueueFull, RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.deadline import Deadline
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.generation import GenerationStream, Usage
from trioserve.requests.media.audio import Samples
from trioserve.requests.media.parts import AudioPart
from trioserve.requests.options import RequestOptions
from trioserve.requests.request import FinishReason
from trioserve.requests.speech.reader import RATE, SpeechReader
from trioserve.requests.speech.segments import TokenSpan, spans_of
from trioserve.requests.speech.tasks import (
    ENGLISH,
    SpeechOptions,
    tokens_before,
    tokens_that_detect,
)
from trioserve.requests.speech.transcript import Segment, Transcript
from trioserve.requests.speech.window_output import MOST_FOLLOWED, TEMPERATURES, WindowOutput
from trioserve.requests.speech.words import has_spaces, with_words
from trioserve.requests.stream import TokenLogprob
from trioserve.text.tokenizer import Tokenizer

OnText = Callable[[str], Awaitable[None]]
"""Takes a piece of a transcript's text as soon as it is known."""
OpenWindow = Callable[
    [SpeechPrompt, SamplingParams, RequestOptions, Deadline],
    contextlib.AbstractAsyncContextManager[GenerationStream],
]
"""Opens the request of a window, for a block."""
AUDIO = "audio"
"""Name of the audio in errors."""
_UNFINISHED = "\ufffd"
"""End of a text whose last character isn't complete."""


@attrs.frozen(eq=False, kw_only=True)
class Transcriber:
    """Makes transcripts.

    Args:
        reader: Reads audio.
        tokenizer: The model's.
        max_model_len: Longest sequence in tokens.
        open_window: Opens requests.
        at_a_time: Transcripts that are made at a time; the files of others wait as they are.
        max_waiting: Most transcripts that wait.
    """

    reader: SpeechReader
    tokenizer: Tokenizer
    max_model_len: int
    open_window: OpenWindow
    at_a_time: trio.CapacityLimiter
    max_waiting: int

    async def transcribe(
        self,
        audio: AudioPart,
        options: SpeechOptions,
        request: RequestOptions,
        deadline: Deadline,
        on_text: OnText | None = None,
    ) -> Transcript:
        """Return the transcript of ``audio``.

        Args:
            audio: The audio.
            options: What is asked for.
            request: Options of the windows' requests.
            deadline: End of all of it.
            on_text: Called with each piece of the text; together they are the text.

        Raises:
            InvalidRequest: The audio or an option is refused.
            QueueFull: Too many transcripts wait.
            DeadlineExceeded: The deadline has passed.
        """
        options.check(self.reader.config)
        if self.at_a_time.statistics().tasks_waiting >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} transcripts wait already")
        with deadline.enforced():
            async with self.at_a_time:
                samples = await self.reader.read(audio, AUDIO)
                running = _Running(self, samples, options, request, deadline, on_text)
                return await running.result()

    def previous(self, text: str) -> list[int]:
        """Return the tokens of a text that precedes the audio; of a long one, the last.

        Raises:
            InvalidRequest: It can't be encoded.
        """
        if not text.strip():
            return []
        try:
            ids = self.tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
        except InvalidRequest as error:
            raise InvalidRequest(str(error), param="prompt") from error
        return ids[-self.most_previous :]

    @property
    def most_previous(self) -> int:
        """Most tokens of text that precedes a window."""
        return self.max_model_len // 2 - 1


@attrs.define(eq=False)
class _Running:
    """A transcript that is being made."""

    _by: Transcriber
    _samples: Samples
    _options: SpeechOptions
    _request: RequestOptions
    _deadline: Deadline
    _on_text: OnText | None
    _segments: list[Segment] = attrs.field(init=False, factory=list)
    _text: str = attrs.field(init=False, default="")
    """Text of the windows before the present one."""
    _told: int = attrs.field(init=False, default=0)
    """Characters of the stripped text that were given to ``on_text``."""
    _usage: Usage = attrs.field(
        init=False, default=Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    )
    _num_requests: int = attrs.field(init=False, default=0)
    _previous: list[int] = attrs.field(init=False, factory=list)
    """Tokens of the text so far that precedes the next window."""
    _language: str = attrs.field(init=False, default="")
    """Code of the language that is spoken, once it is known."""

    async def result(self) -> Transcript:
        by, options = self._by, self._options
        config, seconds = by.reader.config, len(self._samples) / RATE
        given = by.previous(options.prompt)
        self._language = options.language or await self._detected()
        start = 0.0
        while start < seconds:
            own = min(config.window_seconds, seconds - start)
            previous = [*given, *self._previous][-by.most_previous :]
            tokens = tokens_before(config, options, self._language, previous)
            start += await self._window(start, own, tokens)
        text = self._text.strip()
        await self._tell(text, is_whole=True)
        return Transcript(
            text=text,
            language=self._language,
            duration=seconds,
            segments=tuple(self._segments),
            usage=self._usage,
        )

    async def _detected(self) -> str:
        """Return the code of the language that is spoken in the first window."""
        config = self._by.reader.config
        if not config.languages:
            return ENGLISH
        given = SamplingParams(detokenize=False, max_tokens=1, temperature=0.0)
        ids, _ = await self._tokens(0.0, tokens_that_detect(config), given)
        return next(code for code, token in config.languages.items() if token == ids[0])

    async def _window(self, start: float, seconds: float, prompt: tuple[int, ...]) -> float:
        """Transcribe the window that begins at ``start``; return when the next one does, in it."""
        options = self._options
        if options.temperature is None and not self._streams:
            heard = await self._plausible(start, prompt)
            if heard.is_silent:
                return seconds
        else:
            heard = await self._output(start, prompt, options.temperature or 0.0, None)
        spans, step = [TokenSpan(0.0, seconds, heard.tokens)], seconds
        if options.timestamps:
            spans, step = spans_of(heard.tokens, seconds, self._by.reader.config)
        segments = [
            Segment(
                start=self._time(start + span.start),
                end=self._time(start + span.end),
                text=text,
                token_ids=tuple(span.tokens),
                window_start=start,
                average_logprob=heard.average_logprob,
                no_speech_prob=heard.no_speech_prob,
                temperature=heard.temperature,
            )
            for span in spans
            if (text := self._decoded(span.tokens)).strip()
        ]
        if options.word_timestamps and segments:
            segments = await self._with_words(segments)
        self._segments += segments
        self._text += "".join(each.text for each in segments)
        if options.condition_on_previous_text:
            self._previous += [token for span in spans for token in span.tokens]
            if heard.temperature > MOST_FOLLOWED:
                self._previous.clear()
        if options.timestamps:
            await self._tell(self._text.strip())
        return step

    async def _with_words(self, segments: list[Segment]) -> list[Segment]:
        """Return the segments of a window with their words."""
        by, config = self._by, self._by.reader.config
        start = segments[0].window_start
        text = [token for each in segments for token in each.token_ids if token < config.end_token]
        untimed = attrs.evolve(self._options, timestamps=False)
        before = tokens_before(config, untimed, self._language, [])
        times = await by.reader.token_times(self._samples, start, before, text, AUDIO)
        return with_words(
            segments,
            [self._time(start + each) for each in times],
            by.tokenizer.token_bytes,
            config,
            is_spaced=has_spaces(self._language, self._options.task),
        )

    @property
    def _streams(self) -> bool:
        """True if text is told as it comes. With timestamps, a part may be the next window's."""
        return self._on_text is not None and not self._options.timestamps

    async def _plausible(self, start: float, prompt: tuple[int, ...]) -> WindowOutput:
        """Return the first plausible output of the window at ``start``, or else the last one."""
        for seed, temperature in enumerate(TEMPERATURES):
            found = await self._output(start, prompt, temperature, seed)
            if found.is_plausible:
                break
        return found

    async def _output(
        self, start: float, prompt: tuple[int, ...], temperature: float, seed: int | None
    ) -> WindowOutput:
        by, config = self._by, self._by.reader.config
        behind_start = len(prompt) - prompt[::-1].index(config.start_token)
        num_scored = len(prompt) - behind_start
        given = SamplingParams(
            detokenize=False,
            max_tokens=min(by.max_model_len // 2, by.max_model_len - len(prompt)),
            temperature=temperature,
            seed=seed,
            logprobs=0,
            # Behind the start, silence has a token of its own.
            logprob_token_ids=[config.no_speech_token],
            prompt_logprobs=0 if num_scored else None,
            prompt_logprobs_start=behind_start if num_scored else 0,
        )
        ids, entries = await self._tokens(start, prompt, given, is_text=self._streams)
        logprobs = [entry.logprob for entry in entries[num_scored:]]
        ((_, silence, _),) = entries[0].asked
        return WindowOutput(
            tokens=ids,
            text=self._decoded(ids),
            average_logprob=sum(logprobs) / len(logprobs),
            no_speech_prob=math.exp(silence),
            temperature=temperature,
        )

    def _time(self, seconds: float) -> float:
        """Return a time within the audio; the model may give one behind its end."""
        return round(min(seconds, len(self._samples) / RATE), 3)

    async def _tokens(
        self,
        start: float,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        is_text: bool = False,
    ) -> tuple[list[int], list[TokenLogprob]]:
        """Return the tokens behind ``prompt`` for the window at ``start``.

        Their log-probabilities follow those of the prompt that are asked for.
        """
        by = self._by
        request = attrs.evolve(
            self._request, request_id=f"{self._request.request_id}-{self._num_requests}"
        )
        self._num_requests += 1
        given = await by.reader.prompt(self._samples, start, prompt, AUDIO)
        ids: list[int] = []
        entries: list[TokenLogprob] = []
        async with by.open_window(given, sampling, request, self._deadline) as stream:
            async for chunk in stream:
                ids += chunk.token_ids
                entries += chunk.logprobs or ()
                if chunk.finish_reason == FinishReason.ABORT:
                    raise RequestAborted("the request was aborted")
                if is_text:
                    await self._tell((self._text + self._decoded(ids)).strip())
            if stream.prompt_logprobs is not None:
                entries = stream.prompt_logprobs.entries(list(prompt)) + entries
            self._usage = sum((stream.usage,), start=self._usage)
        if ids and ids[-1] == by.reader.config.end_token:
            ids.pop()
        return ids, entries

    async def _tell(self, text: str, *, is_whole: bool = False) -> None:
        """Give what is new of ``text`` to the caller, unless its last character may change."""
        new = text[self._told :]
        if self._on_text is None or not new or (new.endswith(_UNFINISHED) and not is_whole):
            return
        self._told = len(text)
        await self._on_text(new)

    def _decoded(self, ids: Any) -> str:
        """Return the text of ``ids``, without timestamps and special tokens."""
        end = self._by.reader.config.end_token
        return self._by.tokenizer.decode([id for id in ids if id < end])
