"""The validation by the worker: requests that wait for its answer, others, and failures."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trioserve.protocol.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
    WorkerSentAway,
)
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.prompts import TextPrompt
from trioserve.requests.request import Finish, FinishReason, Request, Sequence, State, Times
from trioserve.requests.stream import Stream, StreamBudget
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.text import worker_validation
from trioserve.text.worker_check import (
    MAX_EXTRA_ARGS_BYTES,
    MAX_EXTRA_ARGS_DEPTH,
    check_of,
)
from trioserve.text.worker_validation import (
    LONG_BYTES,
    MAX_CALLS,
    MAX_CALLS_PER_TENANT,
    MAX_CHECKS,
    MAX_LONG_CALLS,
    MAX_VERDICT_BYTES,
    MAX_WORKERS_LOST,
    WorkerValidation,
)

Clock = trio.testing.MockClock
TIMEOUT = 10.0


def make_request(grammar: str | None = None, *, tenant: str = "", **params: Any) -> Request:
    if grammar is not None:
        params["grammar"] = Grammar("regex", grammar)
    request = Request(
        id="r",
        tenant=tenant,
        prompt=TextPrompt("prompt"),
        params=SamplingParams(**params),
        stream=Stream(StreamBudget(1 << 20, 1 << 20)),
        times=Times(arrived=0.0),
        prompt_ids=[1],
    )
    for index in range(2):
        request.sequences.append(
            Sequence(request=request, index=index, sampler=SamplerParams(), state=State.TOKENIZING)
        )
    return request


def leave(request: Request) -> None:
    """Leave the caller's scope before the request is admitted."""
    for sequence in request.sequences:
        sequence.finish = Finish(FinishReason.ABORT)
        sequence.move_to(State.FINISHED)
    request.reject(RuntimeError("nobody reads this"))


@attrs.define(eq=False)
class ScriptedWorker:
    """Answers after ``seconds`` what ``verdict`` makes of the arguments; can be lost."""

    verdict: Callable[[Any], Any] = lambda arguments: None
    seconds: float = 1.0
    num_attached: int = 0
    calls: list[Any] = attrs.field(factory=list)
    num_open: int = 0
    most_open: int = 0
    num_pings: int = 0
    """Number of pings."""
    _there: trio.Event = attrs.field(factory=trio.Event)
    _lost: trio.Event = attrs.field(factory=trio.Event)
    _loss: WorkerLost | None = None

    @property
    def attached(self) -> bool:
        return self._there.is_set()

    def come(self) -> None:
        self.num_attached += 1
        self._lost = trio.Event()
        self._there.set()

    def lose(self, loss: WorkerLost | None = None) -> None:
        self._loss = loss or WorkerLost("it is gone")
        self._there = trio.Event()
        self._lost.set()

    async def wait_attached(self) -> None:
        while not self.attached:
            await self._there.wait()

    async def call(self, name: str, arguments: object = None, *, one: bool = False) -> Any:
        assert (name, one) in (("prepare", True), ("ping", False))
        if not self.attached:
            raise WorkerLost("there is no worker")
        if name == "ping":
            self.num_pings += 1
            return None
        self.calls.append(arguments)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            with trio.move_on_after(self.seconds):
                await self._lost.wait()
                assert self._loss is not None
                raise self._loss
            return self.verdict(arguments)
        finally:
            self.num_open -= 1


@attrs.define(eq=False)
class Running:
    """A stage under way, with what it let through."""

    stage: WorkerValidation
    worker: ScriptedWorker
    requests: trio.MemorySendChannel[Request]
    prepared: trio.MemoryReceiveChannel[Request]

    def send(self, *requests: Request) -> None:
        for request in requests:
            self.requests.send_nowait(request)

    def passed(self) -> list[Request]:
        """Return the requests that were passed on since the last call."""
        requests = []
        with contextlib.suppress(trio.WouldBlock, trio.EndOfChannel):
            while True:
                requests.append(self.prepared.receive_nowait())
        return requests

    def assert_nothing_left(self) -> None:
        assert self.worker.num_open == 0
        assert not self.stage._open
        assert self.stage._limiter.num_held == 0
        assert self.stage._suspect_limiter.borrowed_tokens == 0
        assert not self.stage._calls


@contextlib.asynccontextmanager
async def running(worker: ScriptedWorker, *, attached: bool = True) -> AsyncIterator[Running]:
    """Run the stage for the block; it must then end by itself and leave nothing behind."""
    requests, inbox = trio.open_memory_channel[Request](math.inf)
    submit, prepared = trio.open_memory_channel[Request](math.inf)
    stage = WorkerValidation(worker, timeout=TIMEOUT)
    if attached:
        worker.come()
    case = Running(stage, worker, requests, prepared)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.run, inbox, submit)
        yield case
        requests.close()
    case.assert_nothing_left()
    with pytest.raises(trio.EndOfChannel):
        while True:
            prepared.receive_nowait()


async def test_requests_with_nothing_to_validate_pass_at_once_and_overtake(
    autojump_clock: Clock,
) -> None:
    async with running(ScriptedWorker(seconds=5)) as case:
        slow, plain, fast = make_request("a+"), make_request(), make_request()
        case.send(slow, plain, fast)
        await trio.sleep(1)
        assert case.passed() == [plain, fast]
        await trio.sleep(4.5)
        assert case.passed() == [slow]
    assert case.worker.calls == [{"grammar": ["regex", "a+"], "extra_args": {}}]


async def test_a_quick_grammar_overtakes_a_slow_one(autojump_clock: Clock) -> None:
    worker = ScriptedWorker(seconds=5)
    async with running(worker) as case:
        slow, quick = make_request("slow"), make_request("quick")
        case.send(slow)
        await trio.sleep(1)
        worker.seconds = 1
        case.send(quick)
        await trio.sleep(2)
        assert case.passed() == [quick]


@pytest.mark.parametrize("param", ["grammar", "extra_args"])
async def test_what_the_worker_refuses_is_the_request_s_error(
    autojump_clock: Clock, param: str
) -> None:
    worker = ScriptedWorker(lambda _: {"error": "there is no such thing", "param": param})
    async with running(worker) as case:
        first, second = make_request("(", extra_args={"bias": 1}), make_request()
        case.send(first, second)
        await first.admitted.wait()
        assert case.passed() == [second]
    assert worker.calls == [{"grammar": ["regex", "("], "extra_args": {"bias": 1}}]
    assert isinstance(first.rejection, InvalidRequest)
    assert (str(first.rejection), first.rejection.param) == ("there is no such thing", param)
    assert first.ended


async def test_equal_requests_ask_once_and_each_gets_an_error_of_its_own(
    autojump_clock: Clock,
) -> None:
    worker = ScriptedWorker(
        lambda arguments: {"error": "no", "param": "grammar"} if arguments["grammar"] else None
    )
    async with running(worker) as case:
        bad = [make_request("(") for _ in range(100)]
        good = [
            make_request(extra_args={"a": number, "b": 2} if even else {"b": 2, "a": number})
            for number in range(2)
            for even in (True, False)
        ]
        case.send(*bad, *good)
        await trio.sleep(5)
        assert set(case.passed()) == set(good)
        later = [make_request("("), make_request(extra_args={"a": 1, "b": 2})]
        case.send(*later)
        await trio.testing.wait_all_tasks_blocked()
        assert case.passed() == later[1:]
        errors = [request.rejection for request in [*bad, later[0]]]
    assert len(worker.calls) == 3
    assert all(isinstance(error, InvalidRequest) and str(error) == "no" for error in errors)
    assert len(set(map(id, errors))) == 101


async def test_another_worker_is_asked_again_for_what_was_fine(autojump_clock: Clock) -> None:
    worker = ScriptedWorker(
        lambda arguments: (
            {"error": "no", "param": "grammar"} if arguments["grammar"][1] == "(" else None
        )
    )
    async with running(worker) as case:
        case.send(make_request("("), make_request("a"))
        await trio.sleep(3)
        worker.lose()
        without = make_request("a")
        case.send(without)
        await trio.sleep(3)
        assert len(case.passed()) == 1  # the first; the other waits for a worker
        worker.come()
        case.send(refused := make_request("("))
        await trio.sleep(3)
        assert case.passed() == [without]
        assert refused.rejection is not None
    assert [call["grammar"][1] for call in worker.calls] == ["(", "a", "a"]
    assert len(case.stage._verdicts) == 2
    assert case.stage._verdict_bytes == sum(v.num_bytes for v in case.stage._verdicts.values())


@pytest.mark.parametrize(("bound", "value"), [("MAX_VERDICTS", 2), ("MAX_VERDICT_BYTES", 25)])
async def test_verdicts_that_were_not_used_for_long_are_forgotten(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(worker_validation, bound, value)
    async with running(ScriptedWorker()) as case:
        for grammar in ["a", "b", "a", "c", "a", "b"]:
            case.send(make_request(grammar))
            await trio.sleep(2)
        assert len(case.passed()) == 6
    assert [call["grammar"][1] for call in case.worker.calls] == ["a", "b", "c", "b"]
    assert case.stage._verdict_bytes == sum(v.num_bytes for v in case.stage._verdicts.values())


async def test_a_lost_worker_delays_and_time_without_one_does_not_count(
    autojump_clock: Clock,
) -> None:
    worker = ScriptedWorker(seconds=6)
    async with running(worker, attached=False) as case:
        request, plain = make_request("a+"), make_request()
        case.send(request)
        await trio.sleep(100)
        worker.come()
        await trio.sleep(5)
        worker.lose()
        case.send(plain)
        await trio.sleep(100)
        assert case.passed() == [plain]
        worker.come()
        await trio.sleep(7)
        assert case.passed() == [request]
    assert len(worker.calls) == 2


@pytest.mark.parametrize(
    ("params", "param"),
    [({"grammar": "a+"}, "grammar"), ({"extra_args": {"x": 1}}, "extra_args")],
)
async def test_what_takes_too_long_is_refused_and_may_be_tried_again(
    autojump_clock: Clock, params: Any, param: str
) -> None:
    worker = ScriptedWorker(seconds=15)
    async with running(worker) as case:
        case.send(request := make_request(**params))
        started = trio.current_time()
        await request.admitted.wait()
        assert trio.current_time() - started == pytest.approx(TIMEOUT)
        assert isinstance(request.rejection, InvalidRequest)
        assert request.rejection.param == param
        assert "takes longer than 10 s" in str(request.rejection)
        case.send(again := make_request(**params))
        await trio.sleep(4)
        assert case.passed() == []
        await trio.sleep(2)
        assert case.passed() == [again]
        # The worker was called once, and no further call is needed.
        case.send(third := make_request(**params))
        await trio.testing.wait_all_tasks_blocked()
        assert case.passed() == [third]
    assert len(worker.calls) == 1


@pytest.mark.parametrize("abandoned", [True, False])
async def test_what_nobody_waits_for_any_more_keeps_its_turn_while_the_worker_computes(
    autojump_clock: Clock, abandoned: bool
) -> None:
    """Else costly grammars that are sent and given up would take the time of all others' calls."""
    worker = ScriptedWorker(seconds=15)
    async with running(worker) as case:
        costly = [make_request(f"costly {number}") for number in range(MAX_CALLS)]
        case.send(*costly)
        await trio.sleep(1 if abandoned else TIMEOUT + 1)
        if abandoned:
            for request in costly:
                leave(request)
        assert all(request.admitted.is_set() for request in costly)
        worker.seconds = 1
        case.send(good := make_request("good"))
        await trio.sleep(14 - trio.current_time())
        assert len(worker.calls) == worker.num_open == MAX_CALLS
        await trio.sleep(3)
        assert case.passed() == [good]
    assert worker.most_open == MAX_CALLS


async def test_a_worker_that_never_answers_keeps_no_turn_for_ever(autojump_clock: Clock) -> None:
    worker = ScriptedWorker(seconds=math.inf)
    async with running(worker) as case:
        case.send(*(make_request(f"costly {number}") for number in range(MAX_CALLS)))
        await trio.sleep(worker_validation.MAX_CALL_SECONDS - 1)
        worker.seconds = 1
        case.send(good := make_request("good"))
        await trio.sleep(0.5)
        assert case.passed() == []
        assert worker.num_pings == 0
        await trio.sleep(2)
        assert case.passed() == [good]
        assert worker.num_pings == MAX_CALLS


async def test_different_questions_that_wait_are_bounded_and_equal_ones_are_not(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_validation, "MAX_CHECKS", 5)
    async with running(ScriptedWorker(seconds=1)) as case:
        waiting = [make_request(f"grammar {number}") for number in range(5)]
        equal = [make_request("grammar 3") for _ in range(20)]
        case.send(*waiting, refused := make_request("grammar 5"), *equal, plain := make_request())
        await trio.testing.wait_all_tasks_blocked()
        assert case.passed() == [plain]
        assert isinstance(refused.rejection, QueueFull)
        assert "5 different grammars or extra_args" in str(refused.rejection)
        await trio.sleep(4)
        assert set(case.passed()) == {*waiting, *equal}
        case.send(again := make_request("grammar 5"))
        await trio.sleep(2)
        assert case.passed() == [again]


async def test_few_calls_at_a_time_and_waiting_for_a_turn_is_not_compiling(
    autojump_clock: Clock,
) -> None:
    worker = ScriptedWorker(seconds=8)
    async with running(worker) as case:
        requests = [make_request(f"grammar {number}") for number in range(3 * MAX_CALLS)]
        case.send(*requests)
        await trio.sleep(25)
        assert set(case.passed()) == set(requests)
    assert worker.most_open == MAX_CALLS


async def test_one_key_with_many_grammars_delays_another_by_none(autojump_clock: Clock) -> None:
    async with running(ScriptedWorker(seconds=5)) as case:
        case.send(*(make_request(f"costly {number}", tenant="a") for number in range(100)))
        await trio.sleep(1)
        assert case.worker.num_open == MAX_CALLS_PER_TENANT
        case.send(request := make_request("cheap", tenant="b"))
        await trio.sleep(5.5)
        assert request in case.passed()


async def test_one_client_with_long_grammars_leaves_a_turn_for_short_ones(
    autojump_clock: Clock,
) -> None:
    async with running(ScriptedWorker(seconds=5)) as case:
        case.send(*(make_request(f"{number}" * LONG_BYTES) for number in range(9)))
        await trio.sleep(1)
        assert case.worker.num_open == MAX_LONG_CALLS
        case.send(request := make_request("cheap"))
        await trio.sleep(5.5)
        assert request in case.passed()


async def test_a_key_has_its_share_of_the_open_questions(autojump_clock: Clock) -> None:
    async with running(ScriptedWorker(seconds=5)) as case:
        greedy = [make_request(f"{number}", tenant="a") for number in range(MAX_CHECKS)]
        case.send(*greedy, late := make_request("late", tenant="b"))
        await trio.sleep(1)
        refused = [request for request in greedy if request.rejection is not None]
        assert len(refused) == MAX_CHECKS // 2
        assert "of this API key; that is its share" in str(refused[0].rejection)
        assert late.rejection is None


async def test_what_the_worker_says_of_a_grammar_s_bytes_bounds_what_is_remembered(
    autojump_clock: Clock,
) -> None:
    async with running(ScriptedWorker(lambda _: MAX_VERDICT_BYTES // 2)) as case:
        for name in ("a", "b", "c", "a"):
            case.send(make_request(name))
            await trio.sleep(2)
        assert case.stage._verdict_bytes == MAX_VERDICT_BYTES
        assert len(case.worker.calls) == 4


async def test_a_request_that_ends_workers_is_given_up_and_its_neighbours_are_not(
    autojump_clock: Clock,
) -> None:
    worker = ScriptedWorker(seconds=1)

    async def restart() -> None:
        """Lose a worker half a second after it was asked about the poison."""
        for _ in range(1 + MAX_WORKERS_LOST):
            await trio.sleep(0.5)
            while not any(call["grammar"][1] == "poison" for call in worker.calls):
                await trio.sleep(0.1)
            worker.calls.clear()
            worker.lose()
            await trio.sleep(5)
            worker.come()

    async with running(worker) as case:
        poison, neighbour = make_request("poison"), make_request("fine")
        case.send(poison, neighbour)
        await restart()
        await trio.sleep(5)
        assert case.passed() == [neighbour]
        assert isinstance(poison.rejection, EngineError)
        assert "lost 3 times while it prepared the request's grammar" in str(poison.rejection)


@pytest.mark.parametrize(
    "loss",
    [
        WorkerSentAway("it is away for a while"),
        WorkerLost("no answer for 3 s", from_outside=True, reason="unreachable"),
    ],
)
async def test_a_worker_that_is_sent_away_or_unreachable_is_no_loss(
    autojump_clock: Clock, loss: WorkerLost
) -> None:
    """Repeat it: the request waits until the worker comes back, and isn't suspected."""
    worker = ScriptedWorker(seconds=1)
    async with running(worker) as case:
        request = make_request("fine")
        case.send(request)
        for _ in range(3 * (1 + MAX_WORKERS_LOST)):
            await trio.sleep(0.5)
            worker.lose(loss)
            await trio.sleep(5)
            assert request.rejection is None
            worker.come()
        await trio.sleep(5)
        assert case.passed() == [request]
        assert len(worker.calls) == 3 * (1 + MAX_WORKERS_LOST) + 1


async def test_a_worker_that_can_not_answer_is_the_engine_s_error(autojump_clock: Clock) -> None:
    def refuse(_: Any) -> Any:
        raise EngineError("prepare: there is no call 'prepare'")

    for verdict, reason in (
        (refuse, "there is no call"),
        (lambda _: 5.5, "the worker answered 5.5"),
    ):
        async with running(ScriptedWorker(verdict)) as case:
            case.send(request := make_request("a"))
            await trio.sleep(2)
            assert isinstance(request.rejection, EngineError)
            assert reason in str(request.rejection)
            case.send(make_request("a"))
            await trio.sleep(2)
        assert len(case.worker.calls) == 2  # not remembered


def nested(depth: int) -> Any:
    """So many lists in one another."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("num_turns", range(4))
def test_an_equal_request_may_come_in_the_moment_of_the_answer(num_turns: int) -> None:
    """Whichever task's turn is first: the order of those that are ready is drawn by trio."""

    async def once() -> None:
        async with running(worker := ScriptedWorker(seconds=10 * TIMEOUT)) as case:
            case.send(first := make_request("a"))
            await trio.sleep(TIMEOUT)
            for _ in range(num_turns):
                await trio.lowlevel.checkpoint()
            case.send(late := make_request("a"))
            await trio.sleep(2 * TIMEOUT)
            assert first.ended
            assert late.ended
            worker.lose()
            await trio.sleep(1)

    for _ in range(10):
        trio.run(once, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"extra_args": {"x": object()}}, "extra_args"),
        ({"extra_args": {"x": 2**70}}, "extra_args"),
        ({"extra_args": {"x": "\ud800"}}, "extra_args"),
        ({"extra_args": {"x": "y" * MAX_EXTRA_ARGS_BYTES}}, "extra_args"),
        ({"extra_args": {"x": nested(MAX_EXTRA_ARGS_DEPTH)}}, "extra_args"),
        ({"extra_args": {"x": [1, {"y": nested(MAX_EXTRA_ARGS_DEPTH - 2)}]}}, "extra_args"),
        ({"grammar": "\ud800"}, "grammar"),
    ],
)
async def test_what_can_not_be_sent_to_the_worker_is_refused(
    autojump_clock: Clock, params: Any, param: str
) -> None:
    async with running(ScriptedWorker()) as case:
        case.send(bad := make_request(**params), good := make_request())
        await trio.testing.wait_all_tasks_blocked()
        assert case.passed() == [good]
    assert isinstance(bad.rejection, InvalidRequest)
    assert bad.rejection.param == param
    assert case.worker.calls == []


async def test_how_deep_extra_args_are_is_that_request_s_matter_alone(
    autojump_clock: Clock,
) -> None:
    """Check that a value that can just be encoded by itself can't be a part of a plan."""
    async with open_fake_engine(
        lambda: FakeWorker(calls={"prepare": lambda _: None}), logits_processors=("a:B",)
    ) as engine:
        for depth in (1, MAX_EXTRA_ARGS_DEPTH - 1):
            await engine.complete([1], max_tokens=2, extra_args={"x": nested(depth)})
        for depth in (MAX_EXTRA_ARGS_DEPTH, *range(970, 1000)):
            with pytest.raises(InvalidRequest) as caught:
                await engine.complete([1], max_tokens=2, extra_args={"x": nested(depth)})
            assert caught.value.param == "extra_args"
        await engine.complete([1], max_tokens=2)
        assert engine.statistics().worker_restarts == 0


async def in_the_call(case: Running) -> Request:
    case.send(request := make_request("a"))
    await trio.sleep(0.5)
    assert case.worker.num_open == 1
    return request


async def without_a_worker(case: Running) -> Request:
    case.worker.lose()
    case.send(request := make_request("a"))
    await trio.sleep(0.5)
    return request


async def waiting_for_a_turn(case: Running) -> Request:
    case.send(*(make_request(f"other {number}") for number in range(MAX_CALLS)))
    case.send(request := make_request("a"))
    await trio.sleep(0.5)
    assert case.worker.num_open == MAX_CALLS
    return request


async def as_a_suspect(case: Running) -> Request:
    request = await in_the_call(case)
    case.worker.lose()
    await trio.sleep(0.5)
    case.worker.come()
    await trio.sleep(0.5)
    assert case.worker.num_open == 1
    return request


async def behind_a_suspect(case: Running) -> Request:
    case.send(make_request("b"), request := make_request("a"))
    await trio.sleep(0.5)
    assert case.worker.num_open == 2
    case.worker.lose()
    await trio.sleep(0.5)
    case.worker.come()
    await trio.sleep(0.5)
    assert case.worker.num_open == 1
    return request


AWAITS = [in_the_call, without_a_worker, waiting_for_a_turn, as_a_suspect, behind_a_suspect]


@pytest.mark.parametrize("reach", AWAITS)
async def test_a_caller_that_leaves_leaves_nothing_behind(
    autojump_clock: Clock, reach: Callable[[Running], Any]
) -> None:
    async with running(ScriptedWorker(seconds=3)) as case:
        request = await reach(case)
        leave(request)
        await trio.testing.wait_all_tasks_blocked()
        key = check_of(request.params, "").key  # type: ignore[union-attr]
        assert key not in case.stage._open
        num_calls = len([call for call in case.worker.calls if call["grammar"][1] == "a"])
        if not case.worker.attached:
            case.worker.come()
        await trio.sleep(20)
        case.assert_nothing_left()
        assert request not in case.passed()
        assert len([c for c in case.worker.calls if c["grammar"][1] == "a"]) == num_calls
        # An equal request afterwards is answered, too.
        case.send(again := make_request("a"))
        await trio.sleep(5)
        assert case.passed() == [again]


async def test_one_of_two_that_leaves_changes_nothing_for_the_other(autojump_clock: Clock) -> None:
    async with running(ScriptedWorker(seconds=3)) as case:
        case.send(first := make_request("a"))
        await trio.sleep(1)
        case.send(second := make_request("a"))
        await trio.sleep(1)
        leave(first)
        await trio.sleep(2)
        assert case.passed() == [second]
    assert len(case.worker.calls) == 1


@pytest.mark.parametrize("ticks", range(8))
async def test_one_that_joins_in_the_moment_when_the_last_leaves_is_answered(
    autojump_clock: Clock, ticks: int
) -> None:
    async with running(ScriptedWorker(seconds=3)) as case:
        first = await in_the_call(case)
        leave(first)
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        case.send(second := make_request("a"))
        await trio.sleep(4)
        assert case.passed() == [second]


async def test_one_that_has_ended_before_it_came_asks_nothing(autojump_clock: Clock) -> None:
    async with running(ScriptedWorker()) as case:
        request, plain = make_request("a"), make_request()
        leave(request)
        leave(plain)
        case.send(request, plain)
        await trio.sleep(5)
        assert case.passed() == []
    assert case.worker.calls == []


@pytest.mark.parametrize("reach", AWAITS)
async def test_the_engine_s_end_ends_the_stage_wherever_it_is(
    autojump_clock: Clock, reach: Callable[[Running], Any]
) -> None:
    requests, inbox = trio.open_memory_channel[Request](math.inf)
    submit, prepared = trio.open_memory_channel[Request](math.inf)
    worker = ScriptedWorker(seconds=3)
    worker.come()
    case = Running(WorkerValidation(worker, timeout=TIMEOUT), worker, requests, prepared)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(case.stage.run, inbox, submit)
        request = await reach(case)
        nursery.cancel_scope.cancel()
    case.assert_nothing_left()
    assert not request.admitted.is_set()
    with pytest.raises(trio.EndOfChannel):
        prepared.receive_nowait()
