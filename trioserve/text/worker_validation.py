"""The task between tokenizer and scheduler: the worker validates grammars and ``extra_args``.

Only the worker can compile a grammar, and only it has the logits processors that validate a
request's ``extra_args``. A request with either waits here for the worker's ``prepare`` call. Then
the request goes on to the scheduler or is refused. Other requests pass at once.

The number of concurrent calls is limited. Tenants, such as API keys, share them fairly
(:mod:`~trioserve.text.fair_limiter`): one tenant can't have all calls, and one call is kept for
short texts. A tenant's open checks are limited as well.

Equal requests share one check, and verdicts are cached. A refusal holds for every worker, because
all have the same model. A success is dropped when another worker starts: the new worker hasn't
compiled the grammar, and compiling it later would delay the request's first step. For the same
reason this cache is smaller than the worker's. A timeout isn't cached, because the result may be
ready the next time.

A call keeps its permit until the worker has answered, even if its requests have timed out or left:
the worker computes on, and further calls would only wait there. An equal request joins that call.
Past the limit of open checks a request is refused as if the queue were full.

One worker answers for all. If a request is placed on another one, that one compiles the grammar in
its turn, before it computes the request (:mod:`trioserve.scheduler.grammar_recompiling`).

When the worker is lost, the check is repeated with another one. The check may have caused the
loss, so only one such check runs at a time, and it fails after ``MAX_WORKERS_LOST`` more losses.
Otherwise one request could end the engine for all. A lost link to another host doesn't count.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import trio

from trioserve._util.channels import forward, receive_waiting
from trioserve.protocol.errors import (
    EngineError,
    InvalidRequest,
    QueueFull,
    WorkerLost,
    WorkerSentAway,
)
from trioserve.requests.request import Request
from trioserve.requests.tenants import excess
from trioserve.text.fair_limiter import FairLimiter
from trioserve.text.worker_check import WorkerCheck, check_of, read_answer, refusal_of

MAX_CALLS = 3
"""Most concurrent calls. The timeout of a check begins when its call has a permit."""
MAX_CALLS_PER_TENANT = 2
MAX_LONG_CALLS = 2
"""Most concurrent calls with long grammars or arguments."""
LONG_BYTES = 2048
"""Bytes above which a check counts as long. Most short checks are fast."""
MAX_CHECKS = 256
"""Most open checks. Each may take seconds, and its requests count as queued, so they could fill the
queue.
"""
MAX_CALL_SECONDS = 60.0
"""Seconds after which a call without an answer loses its permit, and the worker is pinged."""
RETRY_SECONDS = 5.0
MAX_VERDICTS = 512
MAX_VERDICT_BYTES = 128 << 20
"""Most bytes of grammars with a cached verdict. The worker's cache is twice as large."""
MAX_WORKERS_LOST = 2


class ValidatingWorker(Protocol):
    """The methods of :class:`~trioserve.engine.schedulers.Schedulers` that are used here."""

    @property
    def attached(self) -> bool:
        """True while there is a worker."""

    @property
    def num_attached(self) -> int:
        """Number of workers attached since the start, the present ones included."""

    async def wait_attached(self) -> None:
        """Block until there is a worker."""

    async def call(self, name: str, arguments: object = None, *, one: bool = False) -> Any:
        """Call all workers that are there, or one; raises ``EngineError`` or ``WorkerLost``."""


@attrs.define(eq=False)
class _Call:
    """A call to the worker. Once it is done, it has a verdict, an error, or neither: a timeout."""

    check: WorkerCheck
    is_suspect: bool
    """True if a worker was lost during an earlier call for this check."""
    has_permit: bool = False
    done: trio.Event = attrs.field(factory=trio.Event)
    verdict: _Verdict | None = None
    error: Exception | None = None


@attrs.frozen
class _Verdict:
    """The answer of worker number ``worker``; ``refusal`` is None on success."""

    refusal: InvalidRequest | None
    worker: int
    num_bytes: int


class WorkerValidation:
    """Task that forwards requests once the worker has accepted them.

    Args:
        worker: The schedulers, which outlive worker processes.
        timeout: Seconds for the worker's answer.
        observe_grammar: Called with each grammar's kind, its outcome (``ok``, ``refused`` or
            ``timeout``) and the seconds that the worker took.
    """

    def __init__(
        self,
        worker: ValidatingWorker,
        *,
        timeout: float,
        observe_grammar: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        self._worker = worker
        self._timeout = timeout
        self._observe_grammar = observe_grammar
        self._open: dict[bytes, WorkerCheck] = {}
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._verdict_bytes = 0
        self._calls: dict[bytes, _Call] = {}
        """Calls in flight, with or without requests that wait for them."""
        self._limiter = FairLimiter(
            MAX_CALLS,
            max_per_tenant=MAX_CALLS_PER_TENANT,
            max_expensive=MAX_LONG_CALLS,
            expensive_above=LONG_BYTES,
        )
        self._suspect_limiter = trio.CapacityLimiter(1)
        self._nursery: trio.Nursery | None = None
        """Nursery of the calls, while the task runs."""

    async def run(
        self,
        requests: trio.MemoryReceiveChannel[Request],
        submit: trio.MemorySendChannel[Request],
    ) -> None:
        """Forward each request after its check, or reject it, until ``requests`` is closed.

        Requests that have ended are dropped. ``submit`` is closed at the end.
        """
        async with submit, trio.open_nursery() as self._nursery:
            async with trio.open_nursery() as nursery:
                async for first in requests:
                    for request in (first, *receive_waiting(requests)):
                        if not request.ended:
                            await self._validate(request, submit, nursery)
            self._nursery.cancel_scope.cancel()

    async def _validate(
        self, request: Request, submit: trio.MemorySendChannel[Request], nursery: trio.Nursery
    ) -> None:
        """Forward ``request``, reject it, or let it wait for a verdict."""
        try:
            check = check_of(request.params, request.tenant)
        except InvalidRequest as error:
            request.reject(error)
            return
        verdict = None if check is None else self._cached_verdict(check.key)
        if check is None or verdict is not None:
            await _forward(request, verdict.refusal if verdict else None, submit)
        elif (open_check := self._open.get(check.key)) is not None:
            self._join(open_check, request)
        elif (reason := self._limit_reached(request.tenant)) is not None:
            request.reject(QueueFull(reason, retry_after=RETRY_SECONDS))
        else:
            self._open[check.key] = check
            self._join(check, request)
            nursery.start_soon(self._run_check, check, submit)
            # Without it, checks could start in any order.
            await trio.lowlevel.checkpoint()

    def _limit_reached(self, tenant: str) -> str | None:
        """Return the limit that one more check of ``tenant`` would exceed; None if it fits."""
        number = len(self._open)
        what = "different grammars or extra_args are being prepared or wait for it"
        if number >= MAX_CHECKS:
            return f"{number} {what}; that is the limit"
        own = sum(each.tenant == tenant for each in self._open.values()) if tenant else 0
        if excess(own, 1, number - own, MAX_CHECKS) > 0:
            return f"{own} {what} of this API key; that is its share"
        return None

    def _cached_verdict(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None:
            return None
        present = self._worker.attached and verdict.worker == self._worker.num_attached
        if verdict.refusal is None and not present:
            return None
        self._verdicts.move_to_end(key)
        return verdict

    async def _run_check(self, check: WorkerCheck, submit: trio.MemorySendChannel[Request]) -> None:
        """Run a check, then forward or reject its requests. It is cancelled when all have left."""
        answered = False
        error: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                check.nursery = nursery
                for request in check.waiting:
                    nursery.start_soon(self._watch, check, request)
                error = await self._check_until_answered(check)
                answered = True
                # Close it first: no request may join while the nursery ends.
                self._close(check)
                nursery.cancel_scope.cancel()
        finally:
            self._close(check)
        if answered:
            for request in check.waiting:
                await _forward(request, error, submit)

    async def _watch(self, check: WorkerCheck, request: Request) -> None:
        """Remove ``request`` from the check if it ends before the answer comes."""
        await request.admitted.wait()
        del check.waiting[request]
        if not check.waiting:
            # Close it first: no request may join a cancelled check.
            self._close(check)
            assert check.nursery is not None
            check.nursery.cancel_scope.cancel()

    def _join(self, check: WorkerCheck, request: Request) -> None:
        check.waiting[request] = None
        if check.nursery is not None:
            check.nursery.start_soon(self._watch, check, request)

    def _close(self, check: WorkerCheck) -> None:
        if self._open.get(check.key) is check:
            del self._open[check.key]

    async def _check_until_answered(self, check: WorkerCheck) -> Exception | None:
        """Repeat the check until a worker answers; return the error or refusal, None on success."""
        num_lost = 0
        while num_lost <= MAX_WORKERS_LOST:
            try:
                return await self._check_once(check, is_suspect=num_lost > 0)
            except WorkerSentAway:
                pass  # The worker was stopped on request and will be started again.
            except WorkerLost as loss:
                num_lost += loss.reason != "unreachable"  # No grammar ends a link.
            except EngineError as error:
                return error
        return EngineError(
            f"the worker was lost {1 + MAX_WORKERS_LOST} times while it prepared the request's "
            f"{check.param}"
        )

    async def _check_once(self, check: WorkerCheck, *, is_suspect: bool) -> InvalidRequest | None:
        """Call the worker, or join an equal call in flight; return the refusal, None on success.

        Raises:
            WorkerLost: The worker was lost before it answered.
            EngineError: The worker can't answer.
        """
        call = self._calls.get(check.key) or await self._start(check, is_suspect)
        with trio.move_on_after(self._timeout):
            await call.done.wait()
        if call.error is not None:
            raise call.error
        if call.verdict is not None:
            return call.verdict.refusal
        self._observe(check, "timeout", self._timeout)
        return refusal_of(
            f"the request's {check.param} takes longer than {self._timeout:g} s to prepare "
            "(--grammar-timeout)",
            check.param,
        )

    async def _start(self, check: WorkerCheck, is_suspect: bool) -> _Call:
        """Wait for a permit and a worker, then start a call in a task of its own."""
        if is_suspect:
            await self._suspect_limiter.acquire_on_behalf_of(check)
        call = _Call(check, is_suspect)
        try:
            await self._limiter.acquire(call, check.tenant, check.num_bytes)
            call.has_permit = True
            await self._worker.wait_attached()
        except BaseException:
            self._end(call)
            raise
        self._calls[check.key] = call
        assert self._nursery is not None
        self._nursery.start_soon(self._run, call)
        return call

    async def _run(self, call: _Call) -> None:
        check, number = call.check, self._worker.num_attached
        started = trio.current_time()
        time_limit = trio.CancelScope(deadline=started + max(self._timeout, MAX_CALL_SECONDS))
        try:
            with time_limit:
                answer = await self._worker.call("prepare", check.arguments, one=True)
                refusal, num_bytes = read_answer(answer)
                call.verdict = _Verdict(refusal, number, max(num_bytes, check.num_bytes))
        except (EngineError, WorkerLost) as error:
            call.error = error
        finally:
            del self._calls[check.key]
            self._end(call)
        if (verdict := call.verdict) is not None:
            outcome = "ok" if verdict.refusal is None else "refused"
            self._observe(check, outcome, trio.current_time() - started)
            self._cache_verdict(check, verdict)
        if time_limit.cancelled_caught:
            await self._ping_worker()

    async def _ping_worker(self) -> None:
        """Ping the worker, so that the watchdog replaces it if it is hung."""
        with contextlib.suppress(EngineError, WorkerLost):
            await self._worker.call("ping")

    def _end(self, call: _Call) -> None:
        if call.has_permit:
            self._limiter.release(call)
        if call.is_suspect:
            self._suspect_limiter.release_on_behalf_of(call.check)
        call.done.set()

    def _cache_verdict(self, check: WorkerCheck, verdict: _Verdict) -> None:
        if check.key in self._verdicts:
            self._verdict_bytes -= self._verdicts.pop(check.key).num_bytes
        self._verdicts[check.key] = verdict
        self._verdict_bytes += verdict.num_bytes
        while len(self._verdicts) > MAX_VERDICTS or self._verdict_bytes > MAX_VERDICT_BYTES:
            _, dropped = self._verdicts.popitem(last=False)
            self._verdict_bytes -= dropped.num_bytes

    def _observe(self, check: WorkerCheck, outcome: str, seconds: float) -> None:
        grammar = check.arguments["grammar"]
        if grammar is not None:
            self._observe_grammar(grammar[0], outcome, seconds)


async def _forward(
    request: Request, error: Exception | None, submit: trio.MemorySendChannel[Request]
) -> None:
    if error is not None:
        # A copy, because a raised error collects a traceback, and this one is cached.
        request.reject(copy.copy(error))
    else:
        await forward(submit, request)
