"""Load on an engine of this program, each answer of which is known beforehand."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import trio

from bench.faults.mixture import texts
from trioserve import Engine
from trioserve.protocol.errors import TrioserveError

_AFTER_A_FAILURE = 0.1


@attrs.define(eq=False, kw_only=True)
class Steady:
    """Clients that ask for the same few answers again and again, half of them with a seed.

    The requests are answered once undisturbed (:meth:`learn`); from then on every answer has to be
    the same, whatever happens to the worker.
    """

    engine: Engine
    clients: int = 8
    requests: int = 16
    output_tokens: int = 48
    longest_prompt: int = 30
    answered: int = 0
    tokens: int = 0
    last_token: float = 0.0
    """When a token came last, to anybody."""
    failed: Counter[str] = attrs.field(factory=Counter)
    differing: int = 0
    """Answers that were other than the undisturbed one."""
    _expected: list[tuple[int, ...]] = attrs.field(factory=list)
    _progress: trio.Event = attrs.field(factory=trio.Event)
    _ending: bool = False

    def fields(self, index: int) -> dict[str, Any]:
        """The ``index``-th request."""
        (prompt,) = (next(texts(random.Random(index), 3, self.longest_prompt)),)
        return {
            "prompt": prompt,
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0 if index % 2 else 0.8,
            "seed": index,
        }

    async def learn(self) -> None:
        """The answers, before anything is disturbed."""
        self._expected = [()] * self.requests

        async def ask(index: int) -> None:
            completion = await self.engine.complete(**self.fields(index))
            self._expected[index] = completion.token_ids

        async with trio.open_nursery() as nursery:
            for index in range(self.requests):
                nursery.start_soon(ask, index)

    async def run(self) -> None:
        """Ask until :meth:`end`; whoever asks then is still answered."""
        async with trio.open_nursery() as nursery:
            for number in range(self.clients):
                nursery.start_soon(self._ask, random.Random(number))

    def end(self) -> None:
        """Ask nothing more."""
        self._ending = True

    async def wait_token(self) -> None:
        """Wait for the next token that comes to anybody."""
        await self._progress.wait()

    async def _ask(self, numbers: random.Random) -> None:
        while not self._ending:
            index = numbers.randrange(self.requests)
            tokens: list[int] = []
            try:
                async with self.engine.generate(**self.fields(index)) as stream:
                    async for chunk in stream:
                        tokens += chunk.token_ids
                        self._note_progress()
            except TrioserveError as error:
                self.failed[f"{type(error).__name__}: {error}"] += 1
                await trio.sleep(_AFTER_A_FAILURE)
                continue
            self.answered += 1
            self.tokens += len(tokens)
            self.differing += tuple(tokens) != self._expected[index]

    def _note_progress(self) -> None:
        self.last_token = trio.current_time()
        self._progress.set()
        self._progress = trio.Event()
