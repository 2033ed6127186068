"""The task between tokenizing and scheduling: has the worker look at what may turn out wrong.

Whether a grammar can be compiled, and what the server's own logits processors think of a request's
``extra_args``, only the worker knows. So a request that has either waits here until the worker's
``prepare`` call has answered: it then goes on to the scheduler, or is refused. Requests with
neither pass at once, and overtake those that wait.

Calls are few at a time, and shared fairly: tenants, such as API keys, take turns
(:mod:`~trioserve.text.fair_turns`), none has all of them, and one is kept for what is short. A
tenant's open questions are bounded as well.

Equal requests ask once: they join a question that is open, and answers are remembered. A refusal is
as good for any worker, all have the same model. That all is fine is forgotten when another worker
comes: it would be true still, but the new worker hasn't compiled the grammar, and what isn't
compiled beforehand would hold up the step in which the request begins. For the same reason less is
remembered here than the worker keeps. What took too long isn't remembered, as it may be ready by
the next time.

A call that nobody waits for any more, because it takes too long or all have left, keeps its turn
until the worker has answered: the worker computes on, and calls beyond those that it can compute at
a time would only wait there. Whoever asks the same meanwhile joins that call. Different questions
that are open at a time are bounded; past the bound a request is refused as by a full queue.

When the worker is lost, the question waits for the next one and is asked again. In case it was the
question that ended the worker, it is asked with no other of that kind beside it, and given up when
it has cost ``MAX_WORKERS_LOST`` more: else one request could end the engine for all.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import msgspec
import trio

from trioserve._util.channels import all_waiting, pass_on
from trioserve.protocol.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
    WorkerSentAway,
)
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.request import Request
from trioserve.requests.tenants import excess
from trioserve.text.fair_turns import FairTurns

MAX_CALLS = 3
"""Calls under way at a time: the others' time to answer doesn't run while they wait their turn."""
MAX_CALLS_OF_TENANT = 2
MAX_LONG_CALLS = 2
"""Calls under way about long grammars or arguments."""
LONG_BYTES = 2048
"""What is longer counts as long. Short ones may take long, too, but most don't."""
MAX_QUESTIONS = 256
"""Different ones that are open at a time. Each may take seconds, and what waits for them counts
among the queued: so they can't fill the queue for requests that have nothing to prepare."""
MAX_CALL_SECONDS = 60.0
"""For how long a call that nobody waits for keeps its turn, should no answer ever come."""
RETRY_SECONDS = 5.0
MAX_VERDICTS = 512
MAX_VERDICT_BYTES = 128 << 20
"""Of what the worker has compiled. It keeps twice as many grammars, of twice the bytes."""
MAX_EXTRA_ARGS_BYTES = 256 << 10
"""As MessagePack: the worker is sent them with every output."""
MAX_EXTRA_ARGS_DEPTH = 64
"""Maps and lists in one another: what can just be encoded here couldn't be as a part of a plan."""
MAX_WORKERS_LOST = 2


class PreparingWorker(Protocol):
    """What is needed of the :class:`~trioserve.scheduler.scheduler.Scheduler`."""

    @property
    def attached(self) -> bool:
        """Whether a worker is there."""

    @property
    def num_attached(self) -> int:
        """Workers that have been attached since the start, the present one included."""

    async def wait_attached(self) -> None:
        """Wait until a worker is there."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker answer; raises ``EngineError`` or ``WorkerLost``."""


@attrs.define(eq=False)
class _Question:
    """What the worker is asked for the sake of every request in ``waiting``."""

    key: bytes
    num_bytes: int
    arguments: dict[str, Any]
    tenant: str
    """Of the request that came first."""
    waiting: dict[Request, None] = attrs.field(factory=dict)
    """In the order of their arrival."""
    nursery: trio.Nursery | None = None
    """Open while it is asked."""

    @property
    def param(self) -> str:
        for name in ("grammar", "extra_args"):
            if self.arguments[name]:
                return name
        return "logits_processors"


@attrs.define(eq=False)
class _Call:
    """A call to the worker under way, or its outcome: a verdict or an error, once it is done."""

    question: _Question
    is_suspect: bool
    """Whether the worker was lost while it was asked the same before."""
    has_turn: bool = False
    done: trio.Event = attrs.field(factory=trio.Event)
    verdict: _Verdict | None = None
    error: Exception | None = None


@attrs.frozen
class _Verdict:
    """An answer: ``refusal`` is None if all is fine, which the ``worker``-th one said."""

    refusal: InvalidRequest | None
    worker: int
    num_bytes: int


class Preparation:
    """Lets requests through that the worker has found fine.

    Args:
        worker: answers, and outlives its processes: the scheduler.
        timeout: seconds that the worker has for an answer.
        observe_grammar: is told of each grammar's kind, what became of it (``ok``, ``refused`` or
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
        self._open: dict[bytes, _Question] = {}
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._verdict_bytes = 0
        self._calls: dict[bytes, _Call] = {}
        """Those under way, whether somebody waits for them or not."""
        self._turns = FairTurns(
            MAX_CALLS, most_each=MAX_CALLS_OF_TENANT, most_dear=MAX_LONG_CALLS, dear=LONG_BYTES
        )
        self._suspects_turn = trio.CapacityLimiter(1)
        self._nursery: trio.Nursery | None = None
        """Of the calls, while the task runs."""

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        submit: trio.MemorySendChannel[Request],
    ) -> None:
        """The task: send each request on when it is fine, or reject it; forget those that ended.

        Ends when ``requests`` is closed and everything was sent on, and then closes ``submit``.
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
        """Let ``request`` through, reject it, or let it wait for an answer."""
        try:
            question = _question_of(request.params, request.tenant)
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

    async def _settle(self, question: _Question, submit: trio.MemorySendChannel[Request]) -> None:
        """Ask, and hand the requests on that wait for the answer; stop when none waits any more."""
        answered = False
        error: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                question.nursery = nursery
                for request in question.waiting:
                    nursery.start_soon(self._watch, question, request)
                error = await self._answer(question)
                answered = True
                # Nobody may join from here on: the nursery closes a little before the block ends.
                self._close(question)
                nursery.cancel_scope.cancel()
        finally:
            self._close(question)
        if answered:
            for request in question.waiting:
                await _hand_on(request, error, submit)

    async def _watch(self, question: _Question, request: Request) -> None:
        """Let ``request`` go when it ends before the answer comes."""
        await request.admitted.wait()
        del question.waiting[request]
        if not question.waiting:
            # At once, so that nobody joins what isn't asked any more.
            self._close(question)
            assert question.nursery is not None
            question.nursery.cancel_scope.cancel()

    def _join(self, question: _Question, request: Request) -> None:
        question.waiting[request] = None
        if question.nursery is not None:
            question.nursery.start_soon(self._watch, question, request)

    def _close(self, question: _Question) -> None:
        if self._open.get(question.key) is question:
            del self._open[question.key]

    async def _answer(self, question: _Question) -> Exception | None:
        """Ask until a worker answers; the error that the answer is, if it is one."""
        num_lost = 0
        while num_lost <= MAX_WORKERS_LOST:
            try:
                return await self._ask(question, is_suspect=num_lost > 0)
            except WorkerSentAway:
                pass  # It has done nothing wrong, and comes back.
            except WorkerLost:
                num_lost += 1
            except EngineError as error:
                return error
        return EngineError(
            f"the worker was lost {1 + MAX_WORKERS_LOST} times while it prepared the request's "
            f"{question.param}"
        )

    async def _ask(self, question: _Question, *, is_suspect: bool) -> InvalidRequest | None:
        """Ask once, or wait for the same call of somebody before who doesn't wait any more.

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
        return _refusal(
            f"the request's {question.param} takes longer than {self._timeout:g} s to prepare "
            "(--grammar-timeout)",
            question.param,
        )

    async def _start(self, question: _Question, is_suspect: bool) -> _Call:
        """Begin a call when it is its turn and there is a worker; it then goes on by itself."""
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
                refusal, num_bytes = _read(answer)
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
        """No answer has come, which may be the worker's fault: if it answers nobody, it is hung."""
        with contextlib.suppress(EngineError, WorkerLost):
            await self._worker.call("ping")

    def _end(self, call: _Call) -> None:
        if call.has_turn:
            self._turns.release(call)
        if call.is_suspect:
            self._suspects_turn.release_on_behalf_of(call.question)
        call.done.set()

    def _remember(self, question: _Question, verdict: _Verdict) -> None:
        if question.key in self._verdicts:
            self._verdict_bytes -= self._verdicts.pop(question.key).num_bytes
        self._verdicts[question.key] = verdict
        self._verdict_bytes += verdict.num_bytes
        while len(self._verdicts) > MAX_VERDICTS or self._verdict_bytes > MAX_VERDICT_BYTES:
            _, dropped = self._verdicts.popitem(last=False)
            self._verdict_bytes -= dropped.num_bytes

    def _observe(self, question: _Question, outcome: str, seconds: float) -> None:
        grammar = question.arguments["grammar"]
        if grammar is not None:
            self._observe_grammar(grammar[0], outcome, seconds)


def _question_of(params: SamplingParams, tenant: str) -> _Question | None:
    """What the worker has to be asked about ``params``, if anything.

    Raises:
        InvalidRequest: they can't be sent to it.
    """
    grammar, extra_args = params.grammar, params.extra_args
    if grammar is None and not extra_args and not params.logits_processors:
        return None
    encoded = []
    as_list = None if grammar is None else [grammar.kind, grammar.text]
    for name, value in (("grammar", as_list), ("extra_args", extra_args)):
        try:
            encoded.append(msgspec.msgpack.encode(value, order="deterministic"))
            plain = msgspec.msgpack.decode(encoded[-1])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise _refusal(f"{name} can't be sent to the worker: {error}", name) from error
    if len(encoded[1]) > MAX_EXTRA_ARGS_BYTES:
        raise _refusal(
            f"extra_args must have at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack, "
            f"got {len(encoded[1])}",
            "extra_args",
        )
    if _nests_deeper(plain, MAX_EXTRA_ARGS_DEPTH):
        message = f"extra_args may have {MAX_EXTRA_ARGS_DEPTH} maps and lists in one another"
        raise _refusal(message, "extra_args")
    processors = list(params.logits_processors)
    whole = b"".join([*encoded, msgspec.msgpack.encode(processors)])
    arguments = {"grammar": as_list, "extra_args": extra_args}
    if processors:
        arguments["logits_processors"] = processors
    return _Question(hashlib.sha256(whole).digest(), len(whole), arguments, tenant)


def _nests_deeper(value: Any, most: int) -> bool:
    """Whether more than ``most`` maps and lists lie in one another."""
    level = [value]
    for _ in range(most):
        maps = [each.values() for each in level if isinstance(each, dict)]
        lists = [each for each in level if isinstance(each, list)]
        level = list(itertools.chain(*maps, *lists))
    return any(isinstance(each, (dict, list)) for each in level)


def _read(answer: Any) -> tuple[InvalidRequest | None, int]:
    """The refusal that an answer is, None if all is fine, and the bytes that are compiled.

    Raises:
        EngineError: it is no answer.
    """
    match answer:
        case None:
            return None, 0
        case int(num_bytes):
            return None, num_bytes
        case {"error": str(message), "param": str(param)}:
            return _refusal(message, param), 0
    raise EngineError(f"prepare: the worker answered {answer!r}")


def _refusal(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)


async def _hand_on(
    request: Request, error: Exception | None, submit: trio.MemorySendChannel[Request]
) -> None:
    if error is not None:
        # A copy: what is raised collects a traceback, and this error is remembered.
        request.reject(copy.copy(error))
    else:
        await pass_on(submit, request)
