"""Admission to the queue: the counts, the refusals, and the time to try again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from trioserve import Engine, EngineError, QueueFull, TextPrompt
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.admission import (
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    WINDOW_SECONDS,
    Admission,
    Departures,
    seconds_until_room,
)
from trioserve.requests.request import Request, Sequence, Times
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine

Clock = trio.testing.MockClock


class TestWhenToComeBack:
    @given(st.floats(0, 1e7), st.integers(0, 10**7), st.floats(0, WINDOW_SECONDS))
    def test_it_is_whole_seconds_within_bounds(
        self, to_leave: float, left: int, seconds: float
    ) -> None:
        found = seconds_until_room(to_leave, left, seconds)
        assert isinstance(found, int)
        assert MIN_RETRY_SECONDS <= found <= MAX_RETRY_SECONDS

    @pytest.mark.parametrize(
        ("to_leave", "left", "seconds", "expected"),
        [
            (1, 0, 0, 1),  # nothing is known yet
            (1, 100, 10, 1),
            (50, 100, 10, 5),
            (51, 100, 10, 6),
            (1, 0, 20, 20),  # none left in 20 seconds
            (3, 1, 30, 60),
        ],
    )
    def test_examples(self, to_leave: float, left: int, seconds: float, expected: int) -> None:
        assert seconds_until_room(to_leave, left, seconds) == expected

    def test_only_the_last_half_minute_counts(self) -> None:
        departures = Departures()
        assert departures.note(0, 0.0) == (0, 0.0)
        assert departures.note(10, 5.0) == (10, 5.0)
        assert departures.note(40, 20.0) == (40, 20.0)
        # The sample of the beginning isn't needed any more once that of second 5 is old enough.
        assert departures.note(40, 34.0) == (40, 34.0)
        assert departures.note(40, 35.0) == (30, 30.0)
        assert departures.note(50, 1000.0) == (0, 0.0)

    def test_a_count_that_falls_is_nobody_who_left(self) -> None:
        departures = Departures()
        departures.note(10, 0.0)
        assert departures.note(4, 2.0) == (0, 2.0)

    def test_what_it_remembers_is_bounded(self) -> None:
        departures = Departures()
        for number in range(100_000):
            departures.note(number, number / 1000)
        assert len(departures._samples) <= WINDOW_SECONDS + 2


@contextlib.asynccontextmanager
async def busy_engine(**options: Any) -> AsyncIterator[Engine]:
    """Open an engine that runs one sequence for ever, so that all others wait."""
    worker = lambda: FakeWorker(step_time=0.1, num_pages=4096, max_model_len=2048)  # noqa: E731
    async with open_fake_engine(worker, max_num_seqs=1, **options) as engine:
        async with engine.generate("a", max_tokens=2000, ignore_eos=True) as running:
            await running.receive()
            yield engine
        await trio.sleep(1)
        engine.check_integrity()
        admission = engine._admission
        assert admission.num_entering == admission.num_entering_tokens == 0
        assert admission.num_characters == 0


async def test_the_queue_is_bounded_in_tokens(autojump_clock: Clock) -> None:
    async with busy_engine(max_num_queued_tokens=100) as engine:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_async_context(engine.generate([1] * 50))
            with pytest.raises(QueueFull) as caught:
                await engine.complete([1])
            assert str(caught.value) == (
                "2 requests with 100 tokens are waiting, and this one has 1; the limit is 100 "
                "(--max-num-queued-tokens)"
            )
            assert 1 <= caught.value.retry_after <= 60
        async with engine.generate([1] * 100):
            pass


async def test_one_that_finds_nobody_waiting_is_let_in_however_large(
    autojump_clock: Clock,
) -> None:
    async with busy_engine(max_num_queued_tokens=100) as engine:
        for prompt in ([1] * 1000, "x" * 1000):
            async with engine.generate(prompt):
                with pytest.raises(QueueFull, match="1 requests with 1000 tokens are waiting"):
                    await engine.complete("b")


async def test_outputs_count_each(autojump_clock: Clock) -> None:
    async with busy_engine(max_num_queued_tokens=100) as engine:
        async with engine.generate([1] * 10, n=8):
            with pytest.raises(QueueFull, match=r"8 requests with 80 tokens .* has 40;"):
                await engine.complete([1] * 20, n=2)
            async with engine.generate([1] * 10, n=2):
                pass


async def test_a_text_is_refused_once_its_tokens_are_known(autojump_clock: Clock) -> None:
    # In a row, so that all are on their way before the first of them has been tokenized.
    async with busy_engine(max_num_queued_tokens=1000) as engine:
        refusals: list[QueueFull] = []

        async def wait() -> None:
            try:
                async with engine.generate("x" * 600):
                    await trio.sleep(5)
            except QueueFull as full:
                refusals.append(full)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait)
        assert len(refusals) == 2
        for refusal in refusals:
            assert "this one has 600; the limit is 1000" in str(refusal)


async def test_characters_of_open_prompts_are_bounded(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.requests.admission.MAX_CHARACTERS", 5000)
    cut: dict[str, Any] = {"truncate_prompt_tokens": 1}
    async with busy_engine() as engine:
        async with engine.generate("x" * 3000, **cut):
            with pytest.raises(QueueFull, match="3001 characters, and this one has 3000; at most"):
                await engine.complete("x" * 3000, **cut)
        async with engine.generate("x" * 3000, **cut):
            pass


async def test_the_hint_follows_the_rate_at_which_the_line_moves(autojump_clock: Clock) -> None:
    """4 sequences of 1 s each at a time: one place every quarter of a second."""
    worker = lambda: FakeWorker(step_time=0.1)  # noqa: E731
    async with open_fake_engine(worker, max_num_seqs=4, max_num_queued_reqs=20) as engine:
        hints: list[float] = []

        async def request(n: int) -> None:
            with contextlib.suppress(QueueFull):
                await engine.complete("x", n=n, max_tokens=10, ignore_eos=True)

        async with trio.open_nursery() as nursery:
            for _ in range(30):
                for _ in range(6):
                    nursery.start_soon(request, 1)
                await trio.sleep(1)
            for _ in range(2):  # The first of them run at once.
                for _ in range(20):
                    nursery.start_soon(request, 1)
                await trio.sleep(0.01)
            for n in (1, 8, 16):
                with pytest.raises(QueueFull) as caught:
                    await engine.complete("x", n=n)
                hints.append(caught.value.retry_after)
            nursery.cancel_scope.cancel()
        assert hints[0] == 1
        assert 2 <= hints[1] <= 3
        assert 4 <= hints[2] <= 6


async def test_a_line_that_does_not_move_asks_for_patience(autojump_clock: Clock) -> None:
    async with busy_engine(max_num_queued_reqs=1) as engine, engine.generate("b"):
        hints = []
        for _ in range(4):
            with pytest.raises(QueueFull) as caught:
                await engine.complete("c")
            hints.append(caught.value.retry_after)
            await trio.sleep(10)
        assert hints == [1, 11, 21, 31]


@attrs.define
class FakeQueue:
    """A queue in which no request waits."""

    num_waiting: int = 0
    num_waiting_tokens: int = 0

    def waiting_of(self, tenant: str) -> tuple[int, int]:
        return 0, 0


def make_request(number: int, size: int, num_outputs: int, tenant: str = "") -> Request:
    request = Request(
        id=str(number),
        prompt=TextPrompt("x" * size),
        params=SamplingParams(n=num_outputs),
        stream=Stream(StreamBudget(10, 10)),
        times=Times(arrived=0),
        tenant=tenant,
        fewest_tokens=size // 4,
    )
    request.sequences += [
        Sequence(request=request, index=index, sampler=SamplerParams(seed=0))
        for index in range(num_outputs)
    ]
    return request


class Crowd:
    """Requests that come, are tokenized, admitted or rejected, and leave, in any order."""

    def __init__(self) -> None:
        self.admission = Admission(queue=FakeQueue(), max_requests=6, max_tokens=50)
        self.steps: dict[Request, str] = {}
        self._numbers = itertools.count()

    def come(self, size: int, num_outputs: int, tenant: str = "") -> None:
        request = make_request(next(self._numbers), size, num_outputs, tenant)
        with contextlib.suppress(QueueFull):
            self.admission.enter(request, trio.current_time())
            self.steps[request] = "new"

    def move(self, request: Request, what: str) -> None:
        step = self.steps[request]
        if what == "tokenize" and step == "new":
            self.steps[request] = "tokenized"
            try:
                ids = [0] * len(request.prompt.text)  # type: ignore[union-attr]
                request.tokenized(request.encoded(ids, []))
            except QueueFull as full:
                request.reject(full)
        elif what == "admit" and step == "tokenized":
            request.admit()
        elif what in ("reject", "leave"):
            request.reject(EngineError("no"))
            if what == "leave":
                self.admission.forget(request)
                del self.steps[request]


@given(st.data())
def test_the_counts_are_right_whatever_comes_and_goes(data: st.DataObject) -> None:
    async def main() -> None:
        crowd = Crowd()
        admission = crowd.admission
        for _ in range(data.draw(st.integers(1, 30))):
            what = data.draw(st.sampled_from(["come", "tokenize", "admit", "reject", "leave"]))
            if what == "come":
                crowd.come(
                    data.draw(st.integers(1, 40)),
                    data.draw(st.integers(1, 3)),
                    data.draw(st.sampled_from(["", "one", "two"])),
                )
            elif crowd.steps:
                crowd.move(data.draw(st.sampled_from(list(crowd.steps))), what)
            admission.check_integrity()
            assert admission.num_entering <= admission.max_requests
        for request in list(crowd.steps):
            crowd.move(request, "leave")
        admission.check_integrity()
        assert admission.num_entering == admission.num_entering_tokens == 0
        assert admission.num_characters == 0

    trio.run(main)


def test_the_bound_on_tokens_holds_a_longest_sequence(autojump_clock: Clock) -> None:
    async def main() -> tuple[int, int]:
        async with open_fake_engine() as small:
            pass
        worker = lambda: FakeWorker(max_model_len=5 << 20, num_pages=1 << 20)  # noqa: E731
        async with open_fake_engine(worker) as large:
            pass
        return small._admission.max_tokens, large._admission.max_tokens

    assert trio.run(main, clock=autojump_clock) == (2 << 20, 5 << 20)
