"""Load on an engine or a server: requests of all kinds, and requests with known answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import trio

from trioserve import Engine
from trioserve.protocol.errors import TrioserveError

_WORDS = """
the of and to in is that it for was on are as with they at be this from have or by one had not but
what all were when we there can an your which their said if do will each about how up out them
river light stone garden window letter morning village captain mountain engine paper silver music
""".split()  # noqa: SIM905
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}}
_KINDS = {
    "plain": 4,
    "sampled": 4,
    "several": 2,
    "stops": 2,
    "logprobs": 2,
    "schema": 1,
    "regex": 1,
}
"""The kinds of requests, and how often each comes."""


def texts(numbers: random.Random, fewest: int, most: int) -> Iterator[str]:
    """Yield texts of ``fewest`` to ``most`` words, without end."""
    while True:
        words = numbers.choices(_WORDS, k=numbers.randint(fewest, most))
        yield " ".join(words).capitalize()


def mixture(
    numbers: random.Random, *, longest_prompt: int, longest_output: int
) -> Iterator[dict[str, Any]]:
    """Yield bodies for ``/v1/completions`` without end; lengths in words and in tokens.

    A fifth of the prompts begin alike, so that the prefix cache has something to share.
    """
    prompts = texts(numbers, 1, longest_prompt)
    beginning = next(texts(numbers, longest_prompt // 2, longest_prompt // 2))
    while True:
        (kind,) = numbers.choices(list(_KINDS), list(_KINDS.values()))
        prompt = next(prompts)
        if numbers.random() < 0.2:
            prompt = f"{beginning} {prompt}"[: 4 * longest_prompt]
        regex = f"[a-z]{{{numbers.randint(2, 30)}}}"
        fields: dict[str, dict[str, Any]] = {
            "plain": {"temperature": 0, "ignore_eos": True},
            "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": numbers.getrandbits(32)},
            "several": {"n": numbers.randint(2, 4), "temperature": 0.8, "ignore_eos": True},
            "stops": {"stop": [".", "\n\n", " the"], "temperature": 0.7, "frequency_penalty": 0.5},
            "logprobs": {"logprobs": numbers.randint(0, 5), "temperature": 0},
            "schema": {"response_format": _FORM, "temperature": 0.8},
            "regex": {"structured_outputs": {"regex": regex}},
        }
        yield {"prompt": prompt, "max_tokens": numbers.randint(1, longest_output), **fields[kind]}


@attrs.define(eq=False, kw_only=True)
class Steady:
    """Clients that ask for the same few answers again and again, half of them with a seed.

    The requests are answered once undisturbed (:meth:`learn`); from then on every answer has to be
    the same, whatever happens to the worker. Others are ``differing``.
    """

    engine: Engine
    clients: int = 8
    requests: int = 16
    output_tokens: int = 48
    answered: int = 0
    failed: Counter[str] = attrs.field(factory=Counter)
    differing: int = 0
    _expected: list[tuple[int, ...]] = attrs.field(factory=list)
    _progress: trio.Event = attrs.field(factory=trio.Event)
    _ending: bool = False

    def fields(self, index: int) -> dict[str, Any]:
        """Return the ``index``-th request."""
        how = {"temperature": 0.0 if index % 2 else 0.8, "seed": index, "ignore_eos": True}
        prompt = next(texts(random.Random(index), 3, 30))
        return {"prompt": prompt, "max_tokens": self.output_tokens, **how}

    async def learn(self) -> None:
        """Note the answers, before anything is disturbed."""
        self._expected = [()] * self.requests

        async def ask(index: int) -> None:
            self._expected[index] = (await self.engine.complete(**self.fields(index))).token_ids

        async with trio.open_nursery() as nursery:
            for index in range(self.requests):
                nursery.start_soon(ask, index)

    async def run(self) -> None:
        """Ask until :meth:`end`; requests that run then are still answered."""
        async with trio.open_nursery() as nursery:
            for number in range(self.clients):
                nursery.start_soon(self._ask, random.Random(number))

    def end(self) -> None:
        """Ask nothing more."""
        self._ending = True

    async def wait_token(self) -> None:
        """Wait for the next token of any request."""
        await self._progress.wait()

    async def _ask(self, numbers: random.Random) -> None:
        while not self._ending:
            index = numbers.randrange(self.requests)
            tokens: list[int] = []
            try:
                async with self.engine.generate(**self.fields(index)) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        self._progress.set()
                        self._progress = trio.Event()
            except TrioserveError as error:
                self.failed[f"{type(error).__name__}: {error}"] += 1
                await trio.sleep(0.1)
                continue
            self.answered += 1
            self.differing += tuple(tokens) != self._expected[index]

    def figures(self) -> dict[str, int]:
        """Return the lines of a table."""
        lost = sum(self.failed.values())
        differ = self.differing
        return {"requests answered": self.answered, "lost": lost, "answers that differ": differ}
