"""Streams of all kinds on an engine in this program, whose answers are known beforehand.

Each question is answered once undisturbed. Then clients ask for them again and again, and every
answer is compared with that one: its tokens, and all log-probabilities to the last bit. No two
questions share a cached prefix, so a request that moves to another worker computes all of its
tokens there. Only the turns of a session find those before them. The times of all chunks are kept.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from tests.faults.load import texts
from trioserve import Engine
from trioserve.engine.sessions.continuation import Generation
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.grammar import Grammar
from trioserve.requests.generation import Completion, GenerationStream, completion_of
from trioserve.requests.stream import Chunk, TokenLogprob

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ADAPTER = "random"
"""Name of the adapter that the engine has to have."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
    "several": {"n": 2, "temperature": 0.8, "ignore_eos": True, "logprobs": 0},
    "regex": {"grammar": Grammar("regex", "(ab|cd|e[0-9]){30,60}"), "temperature": 0.8},
    "schema": {"grammar": Grammar("json_schema", json.dumps(_SCHEMA)), "temperature": 0.9},
    "beams": {"beam_width": 3, "n": 2, "logprobs": 1},
    "stops": {"stop": (" captain", "\n\n\n"), "temperature": 0.7, "frequency_penalty": 0.5},
    "prompt": {"prompt_logprobs": 1, "logprobs": 1, "temperature": 0.0, "repetition_penalty": 1.1},
    "adapter": {"adapter": ADAPTER, "temperature": 0.8, "ignore_eos": True, "logprobs": 0},
    "session": {"turns": (" Why is that?", " Tell me more."), "logprobs": 0},
}
"""The fields of requests by kind; all of a request's draws come from its seed. A request with
``turns`` opens a session, and these follow its prompt.
"""
PLAIN = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "several": {"n": 2, "ignore_eos": True},
    "stops": {"stop": ("piano",), "ignore_eos": True},
}
"""Kinds for workers that compute nothing, and so have no logits."""


def questions(
    kinds: Mapping[str, dict[str, Any]], count: int, words: int, tokens: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Return requests of ``kinds`` in turn, with at most so many words and output tokens."""
    numbers = random.Random(seed)
    prompts = texts(numbers, words // 10, words)
    fields_of_each = itertools.islice(itertools.cycle(kinds.values()), count)
    return [
        {
            "prompt": next(prompts),
            "max_tokens": numbers.randint(tokens // 2, tokens),
            "seed": number,
            **fields,
        }
        for number, fields in enumerate(fields_of_each)
    ]


@attrs.frozen
class Facts:
    """Facts of an answer that have to be equal: each output's tokens, its text and its end, and the
    log-probabilities of all outputs and of the prompt."""

    tokens: list[tuple[int, ...]]
    ends: list[tuple[Any, ...]]
    logprobs: list[float]

    @classmethod
    def of(cls, completions: Sequence[Completion]) -> Facts:
        """Return those of an answer: of one request, or of a session's turns."""
        outputs = [output for each in completions for output in each.outputs]
        return cls(
            [each.token_ids for each in outputs],
            [(each.text, each.finish_reason, each.stop_reason) for each in outputs],
            [number for each in completions for number in _logprobs_of(each)],
        )


def _logprobs_of(completion: Completion) -> Iterator[float]:
    if completion.prompt_logprobs is not None:
        yield from _numbers(completion.prompt_logprobs.entries(list(completion.prompt_token_ids)))
    for each in completion.outputs:
        yield from _numbers(each.logprobs or ())
        if each.beam_logprob is not None:
            yield each.beam_logprob


def _numbers(entries: Iterable[TokenLogprob]) -> Iterator[float]:
    for entry in entries:
        yield entry.logprob
        yield from (logprob for _, logprob, _ in entry.top)


@contextlib.contextmanager
def turns_of(
    engine: Engine, asked: Mapping[str, Any]
) -> Iterator[list[tuple[Callable[..., Generation], dict[str, Any]]]]:
    """Give the block the turns of a question: the method that generates each, and its arguments.

    If it is more than one, they are in a session that is open for the block.
    """
    first = {name: value for name, value in asked.items() if name != "turns"}
    if "turns" not in asked:
        yield [(engine.generate, first)]
        return
    with engine.open_session() as session:
        prompts = (first["prompt"], *asked["turns"])
        yield [(session.generate, {**first, "prompt": prompt}) for prompt in prompts]


def num_differing(expected: Iterable[Any], given: Iterable[Any]) -> int:
    """Return the number of places at which two sequences differ; a missing value differs."""
    return sum(one != other for one, other in itertools.zip_longest(expected, given))


@attrs.define(eq=False, kw_only=True)
class Stream:
    """A request that runs or has ended: the times of its chunks by output."""

    question: int
    generation: GenerationStream
    times: dict[int, list[float]] = attrs.field(factory=dict)
    ended: bool = False
    moves: int = 0
    """Number of times that it was moved to another worker."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that another worker has to compute: the prompt's, and those of the
        outputs that haven't ended.
        """
        request = self.generation.request
        running = (each for each in request.sequences if each.finish is None)
        return len(request.prompt_ids) + sum(len(each.output_ids) for each in running)


@attrs.define(eq=False, kw_only=True)
class Load:
    """Clients that ask ``asked`` again and again, and what has come of it."""

    engine: Engine
    asked: list[dict[str, Any]]
    clients: int
    entering: dict[str, int] = attrs.field(factory=dict)
    """Questions of requests that haven't been admitted to the queue, by their salts."""
    running: set[Stream] = attrs.field(factory=set)
    ended: list[Stream] = attrs.field(factory=list)
    failed: Counter[str] = attrs.field(factory=Counter)
    tokens_compared: int = 0
    tokens_differing: int = 0
    ends_differing: int = 0
    logprobs_compared: int = 0
    logprobs_differing: int = 0
    _expected: list[Facts] = attrs.field(factory=list)
    _numbers: Iterator[int] = attrs.field(factory=itertools.count)
    _ending: bool = False

    @property
    def is_right(self) -> bool:
        """True if no request was lost, and nothing differs."""
        differing = self.tokens_differing + self.ends_differing + self.logprobs_differing
        return not self.failed and not differing

    def mistakes(self) -> dict[str, int]:
        """Return the requests lost, by reason, and the numbers of what differs."""
        differing = {
            "tokens": self.tokens_differing,
            "texts and ends": self.ends_differing,
            "log-probabilities": self.logprobs_differing,
        }
        return {**self.failed, **{f"{what} differ": number for what, number in differing.items()}}

    def counts(self) -> dict[str, int]:
        """Return the numbers of answers, of what was compared, and of what differs."""
        return {
            "requests answered": len(self.ended),
            "requests lost": sum(self.failed.values()),
            "tokens compared": self.tokens_compared,
            "tokens that differ": self.tokens_differing,
            "texts and ends that differ": self.ends_differing,
            "log-probabilities compared": self.logprobs_compared,
            "log-probabilities with another bit": self.logprobs_differing,
        }

    async def learn(self) -> None:
        """Take the undisturbed answers."""
        found: dict[int, Facts] = {}
        limit = trio.CapacityLimiter(self.clients)

        async def ask(number: int) -> None:
            async with limit:
                found[number] = await self._answer(number, f"undisturbed {number}", [])

        async with trio.open_nursery() as nursery:
            for number in range(len(self.asked)):
                nursery.start_soon(ask, number)
        self._expected = [found[number] for number in range(len(self.asked))]

    async def run(self) -> None:
        """Ask until :meth:`end`; requests that run then are still answered."""
        async with trio.open_nursery() as nursery:
            for number in range(self.clients):
                nursery.start_soon(self._ask_on, random.Random(number))

    def end(self) -> None:
        """Ask nothing more."""
        self._ending = True

    async def _ask_on(self, numbers: random.Random) -> None:
        while not self._ending:
            question = numbers.randrange(len(self.asked))
            try:
                await self._ask(question)
            except TrioserveError as error:
                self.failed[f"{type(error).__name__}: {error}"] += 1
                await trio.sleep(0.1)

    async def _ask(self, question: int) -> None:
        # A salt of its own: nothing of it is found in a cache.
        salt = f"request {next(self._numbers)}"
        answer = await self._answer(question, salt, self.ended)
        self.compare(self._expected[question], answer)

    async def _answer(self, question: int, salt: str, ended: list[Stream]) -> Facts:
        """Return the answer to a question, and add the stream of each of its turns to ``ended``."""
        completions = []
        with turns_of(self.engine, self.asked[question]) as turns:
            for generate, fields in turns:
                async with contextlib.AsyncExitStack() as stack:
                    self.entering[salt] = question
                    try:
                        opening = generate(**fields, cache_salt=salt)
                        generation = await stack.enter_async_context(opening)
                    finally:
                        del self.entering[salt]
                    stream = Stream(question=question, generation=generation)
                    self.running.add(stream)
                    chunks: list[Chunk] = []
                    try:
                        async for chunk in generation:
                            stream.times.setdefault(chunk.index, []).append(trio.current_time())
                            chunks.append(chunk)
                    finally:
                        stream.ended = True
                        self.running.discard(stream)
                ended.append(stream)
                completions.append(completion_of(generation, chunks))
        return Facts.of(completions)

    def compare(self, expected: Facts, given: Facts) -> None:
        """Count what differs in an answer."""
        self.tokens_compared += sum(map(len, expected.tokens))
        self.logprobs_compared += len(expected.logprobs)
        pairs = itertools.zip_longest(expected.tokens, given.tokens, fillvalue=())
        self.tokens_differing += sum(itertools.starmap(num_differing, pairs))
        self.ends_differing += num_differing(expected.ends, given.ends)
        self.logprobs_differing += num_differing(expected.logprobs, given.logprobs)
