"""The task between tokenizing and scheduling: it has the worker check grammars and extra_args.

Only the worker can compile a grammar, and only the worker has the logits processors that check a
request's ``extra_args``. A request with either waits here for the worker's ``prepare`` call; then
it goes on to the scheduler or is refused. Other requests pass at once and overtake the waiting
ones.

The number of calls at a time is limited. Tenants, such as API keys, take turns
(:mod:`~trioserve.text.fair_turns`): one tenant can't have all calls, and one call is kept for short
texts. A tenant's open questions are limited as well.

Equal requests share one question, and answers are remembered. A refusal holds for every worker,
since all have the same model. A success is forgotten when another worker starts: the new worker
hasn't compiled the grammar, and compiling it later would delay the step in which the request
begins. For the same reason fewer answers are remembered here than the worker keeps. A timeout isn't
remembered, as the answer may be ready by the next time.

A call keeps its permit until the worker has answered, even if its requests have timed out or left:
the worker computes on, and further calls would only wait there. An equal request joins that call.
The number of open questions is limited; past the limit a request is refused as by a full queue.

When the worker is lost, the question is asked again with the next one. It may have caused the loss,
so only one such question is asked at a time, and it fails after ``MAX_WORKERS_LOST`` more losses.
Otherwise one request could end the engine for all.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import trio

from trioserve._util.channels import all_waiting, pass_on
from trioserve.protocol.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
    WorkerSentAway,
)
from trioserve.requests.request import Request
from trioserve.requests.tenants import excess
from trioserve.text.fair_turns import FairTurns
from trioserve.text.prepare_call import Question, question_of, read_answer, refusal_of

MAX_CALLS = 3
"""The most calls at a time. The others' time to answer doesn't run while they wait for a permit."""
MAX_CALLS_OF_TENANT = 2
MAX_LONG_CALLS = 2
"""The most calls at a time with long grammars or arguments."""
LONG_BYTES = 2048
"""Size above which a question is long. Short ones may take long, too, but most don't."""
MAX_QUESTIONS = 256
"""The most questions open at a time. Each may take seconds, and its requests count as queued, so
the limit keeps them from filling the queue.
"""
MAX_CALL_SECONDS = 60.0
"""Seconds for which a call without requests keeps its permit if no answer ever comes."""
RETRY_SECONDS = 5.0
MAX_VERDICTS = 512
MAX_VERDICT_BYTES = 128 << 20
"""Total size of what the worker has compiled. The worker keeps twice as many grammars, of twice the
bytes.
"""
MAX_WORKERS_LOST = 2


class PreparingWorker(Protocol):
    """The methods of the :class:`~trioserve.scheduler.scheduler.Scheduler` that are needed."""

    @property
    def attached(self) -> bool:
        """True while a worker is attached."""

    @property
    def num_attached(self) -> int:
        """The number of workers attached since the start, including the present one."""

    async def wait_attached(self) -> None:
        """Wait until a worker is attached."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Call the worker; raises ``EngineError`` or ``WorkerLost``."""


@attrs.define(eq=False)
class _Call:
    """A call to the worker in flight, or its outcome: a verdict or an error, once it is done."""

    question: Question
    is_suspect: bool
    """True if a worker was lost during an earlier call of this question."""
    has_turn: bool = False
    done: trio.Event = attrs.field(factory=trio.Event)
    verdict: _Verdict | None = None
    error: Exception | None = None


@attrs.frozen
class _Verdict:
    """An answer of the ``worker``-th worker: ``refusal`` is None on success."""

    refusal: InvalidRequest | None
    worker: int
    num_bytes: int


class Preparation:
    """Task that passes requests on once the worker has accepted them.

    Args:
        worker: the scheduler, which outlives worker processes.
        timeout: seconds that the worker has for an answer.
        observe_grammar: called with each grammar's kind, its outcome (``ok``, ``refused`` or
            ``timeout``) and the seconds that the worker took.
    """

    def __init__(
        self,
        worker: PreparingWorker,
        *,
        timeout: float,
        observe_grammar: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        self._worker = worker
        self._timeout = timeout
        self._observe_grammar = observe_grammar
        self._open: dict[bytes, Question] = {}
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._verdict_bytes = 0
        self._calls: dict[bytes, _Call] = {}
        """Calls in flight, with or without requests that wait for them."""
        self._turns = FairTurns(
            MAX_CALLS, most_each=MAX_CALLS_OF_TENANT, most_dear=MAX_LONG_CALLS, dear=LONG_BYTES
        )
        self._suspects_turn = trio.CapacityLimiter(1)
        self._nursery: trio.Nursery | None = None
        """Nursery of the calls, while the task runs."""

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        submit: trio.MemorySendChannel[Request],
    ) -> None:
        """Pass each request on after its check, or reject it; forget requests that ended.

        This ends when ``requests`` is closed and everything was sent on, and then closes
        ``submit``.
        """
        async with submit, trio.open_nursery() as self._nursery:
            async with trio.open_nursery() as nursery:
                async for first in requests:
                    for request in (first, *all_waiting(requests)):
                        if not request.ended:
                            await self._take(request, submit, nursery)
            self._nursery.cancel_scope.cancel()

    async def _take(
        self, request: Request, submit: trio.MemorySendChannel[Request], nursery: trio.Nursery
    ) -> None:
        """Pass ``request`` on, reject it, or let it wait for an answer."""
        try:
            question = question_of(request.params, request.tenant)
        except InvalidRequest as error:
            request.reject(error)
            return
        verdict = None if question is None else self._remembered(question.key)
        if question is None or verdict is not None:
            await _hand_on(request, verdict.refusal if verdict else None, submit)
        elif (asked := self._open.get(question.key)) is not None:
            self._join(asked, request)
        elif (reason := self._no_room_for(request.tenant)) is not None:
            request.reject(QueueFull(reason, retry_after=RETRY_SECONDS))
        else:
            self._open[question.key] = question
            self._join(question, request)
            nursery.start_soon(self._settle, question, submit)
            # Tasks that start in one turn begin in any order.
            await trio.lowlevel.checkpoint()

    def _no_room_for(self, tenant: str) -> str | None:
        """Return why one more question of ``tenant`` is too many, None if it isn't."""
        number = len(self._open)
        what = "different grammars or extra_args are being prepared or wait for it"
        if number >= MAX_QUESTIONS:
            return f"{number} {what}; that is the limit"
        own = sum(each.tenant == tenant for each in self._open.values()) if tenant else 0
        if excess(own, 1, number - own, MAX_QUESTIONS) > 0:
            return f"{own} {what} of this API key; that is its share"
        return None

    def _remembered(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return None
        present = self._worker.attached and verdict.worker == self._worker.num_attached
        if verdict.refusal is None and not present:
            return None
        self._verdicts.move_to_end(key)
        return verdict

    async def _settle(self, question: Question, submit: trio.MemorySendChannel[Request]) -> None:
        """Ask, then pass the waiting requests on; stop when none waits any more."""
        answered = False
        error: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                question.nursery = nursery
                for request in question.waiting:
                    nursery.start_soon(self._watch, question, request)
                error = await self._answer(question)
                answered = True
                # Close it first: no request may join while the nursery ends.
                self._close(question)
                nursery.cancel_scope.cancel()
        finally:
            self._close(question)
        if answered:
            for request in question.waiting:
                await _hand_on(request, error, submit)

    async def _watch(self, question: Question, request: Request) -> None:
        """Remove ``request`` from the question if it ends before the answer comes."""
        await request.admitted.wait()
        del question.waiting[request]
        if not question.waiting:
            # Close it first: no request may join a question that isn't asked any more.
            self._close(question)
            assert question.nursery is not None
            question.nursery.cancel_scope.cancel()

    def _join(self, question: Question, request: Request) -> None:
        question.waiting[request] = None
        if question.nursery is not None:
            question.nursery.start_soon(self._watch, question, request)

    def _close(self, question: Question) -> None:
        if self._open.get(question.key) is question:
            del self._open[question.key]

    async def _answer(self, question: Question) -> Exception | None:
        """Ask until a worker answers; return the error if the answer is one."""
        num_lost = 0
        while num_lost <= MAX_WORKERS_LOST:
            try:
                return await self._ask(question, is_suspect=num_lost > 0)
            except WorkerSentAway:
                pass  # The question didn't cause this, and the worker comes back.
            except WorkerLost:
                num_lost += 1
            except EngineError as error:
                return error
        return EngineError(
            f"the worker was lost {1 + MAX_WORKERS_LOST} times while it prepared the request's "
            f"{question.param}"
        )

    async def _ask(self, question: Question, *, is_suspect: bool) -> InvalidRequest | None:
        """Ask once, or wait for a call in flight with the same question.

        Raises:
            WorkerLost: the worker was lost before it answered.
            EngineError: it can't answer.
        """
        call = self._calls.get(question.key) or await self._start(question, is_suspect)
        with trio.move_on_after(self._timeout):
            await call.done.wait()
        if call.error is not None:
            raise call.error
        if call.verdict is not None:
            return call.verdict.refusal
        self._observe(question, "timeout", self._timeout)
        return refusal_of(
            f"the request's {question.param} takes longer than {self._timeout:g} s to prepare "
            "(--grammar-timeout)",
            question.param,
        )

    async def _start(self, question: Question, is_suspect: bool) -> _Call:
        """Start a call when it has a permit and a worker is attached; it then runs by itself."""
        if is_suspect:
            await self._suspects_turn.acquire_on_behalf_of(question)
        call = _Call(question, is_suspect)
        try:
            await self._turns.acquire(call, question.tenant, question.num_bytes)
            call.has_turn = True
            await self._worker.wait_attached()
        except BaseException:
            self._end(call)
            raise
        self._calls[question.key] = call
        assert self._nursery is not None
        self._nursery.start_soon(self._run, call)
        return call

    async def _run(self, call: _Call) -> None:
        question, number = call.question, self._worker.num_attached
        started = trio.current_time()
        patience = trio.CancelScope(deadline=started + max(self._timeout, MAX_CALL_SECONDS))
        try:
            with patience:
                answer = await self._worker.call("prepare", question.arguments)
                refusal, num_bytes = read_answer(answer)
                call.verdict = _Verdict(refusal, number, max(num_bytes, question.num_bytes))
        except (EngineError, WorkerLost) as error:
            call.error = error
        finally:
            del self._calls[question.key]
            self._end(call)
        if (verdict := call.verdict) is not None:
            outcome = "ok" if verdict.refusal is None else "refused"
            self._observe(question, outcome, trio.current_time() - started)
            self._remember(question, verdict)
        if patience.cancelled_caught:
            await self._look_after_worker()

    async def _look_after_worker(self) -> None:
        """Ping the worker after a call without an answer: a worker that doesn't answer is hung."""
        with contextlib.suppress(EngineError, WorkerLost):
            await self._worker.call("ping")

    def _end(self, call: _Call) -> None:
        if call.has_turn:
            self._turns.release(call)
        if call.is_suspect:
            self._suspects_turn.release_on_behalf_of(call.question)
        call.done.set()

    def _remember(self, question: Question, verdict: _Verdict) -> None:
        if question.key in self._verdicts:
            self._verdict_bytes -= self._verdicts.pop(question.key).num_bytes
        self._verdicts[question.key] = verdict
        self._verdict_bytes += verdict.num_bytes
        while len(self._verdicts) > MAX_VERDICTS or self._verdict_bytes > MAX_VERDICT_BYTES:
            _, dropped = self._verdicts.popitem(last=False)
            self._verdict_bytes -= dropped.num_bytes

    def _observe(self, question: Question, outcome: str, seconds: float) -> None:
        grammar = question.arguments["grammar"]
        if grammar is not None:
            self._observe_grammar(grammar[0], outcome, seconds)


async def _hand_on(
    request: Request, error: Exception | None, submit: trio.MemorySendChannel[Request]
) -> None:
    if error is not None:
        # A copy, because a raised error collects a traceback, and this one is remembered.
        request.reject(copy.copy(error))
    else:
        await pass_on(submit, request)
