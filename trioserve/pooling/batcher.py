"""The task that has texts computed: everything that waits goes into the worker's next call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from trioserve._util.conditions import Conditions
from trioserve._util.feed import Feed
from trioserve.config import EngineConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.pooling.columns import Columns, Floats, vectors_of
from trioserve.pooling.core import MAX_UNDER_WAY, EncodeBatch, EncodeJob, PoolingCore
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, QueueFull, RequestAborted, WorkerLost
from trioserve.requests.admission import (
    DEFAULT_MAX_TOKENS,
    Departures,
    check_share,
    seconds_until_room,
)
from trioserve.scheduler.iterations import Iteration

if TYPE_CHECKING:
    from trioserve.scheduler.scheduler import Scheduler
    from trioserve.workers.supervisor import Supervisor


class WorkerCaller(Protocol):
    """What is needed of the :class:`~trioserve.scheduler.scheduler.Scheduler`."""

    @property
    def attached(self) -> bool:
        """Whether a worker is there."""

    async def wait_attached(self) -> None:
        """Wait until one is."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Have the worker do something by name; raises ``EngineError`` or ``WorkerLost``."""

    def report_fault(self, reason: str) -> None:
        """The worker that is attached counts as hung, and is replaced."""


class Batcher:
    """Computes the jobs of all requests, whatever becomes of the workers.

    Args:
        caller: has the worker.
        metrics: counts calls, and the time that requests wait for theirs.
        iterations: where a record of each call goes, if somebody reads them.
        max_waiting: texts that may wait.
        max_waiting_tokens: tokens that they may have.
        patience: seconds that a call may take beyond the slowest so far; 0 for any time.
    """

    def __init__(
        self,
        caller: WorkerCaller,
        metrics: Metrics,
        iterations: Feed[Iteration],
        *,
        max_waiting: int,
        max_waiting_tokens: int,
        patience: float = 0.0,
    ) -> None:
        self._caller = caller
        self._metrics = metrics
        self._iterations = iterations
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._patience = patience or math.inf
        self._slowest = 0.0
        """Of the calls, in seconds, from when it was sent."""
        self.core = PoolingCore(max_texts=1, max_tokens=1)
        self._work = trio.Event()
        """There may be something to call the worker for."""
        self._conditions = Conditions()
        self._departures = Departures()
        self._num_texts = 0
        """Of all answers, as the following."""
        self._num_calls = 0
        self._num_tokens = 0
        self._step_us = 0
        self._answered = 0.0
        """When the last of them came, in seconds on trio's clock."""

    def set_limits(self, ready: wire.Ready) -> None:
        """Keep to what a worker says that it takes in one call."""
        self.core.max_texts = ready.max_num_seqs
        self.core.max_tokens = ready.max_num_batched_tokens

    async def run(self) -> None:
        """The task: call workers until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._caller.wait_attached()
                self._work = trio.Event()  # before looking: what happens meanwhile isn't missed
                while self._caller.attached:
                    batch = self.core.next_batch(trio.current_time())
                    if batch is None:
                        break
                    # One after the other: tasks that only start soon do so in any order.
                    await nursery.start(self._call, batch)
                await self._work.wait()

    async def _call(
        self, batch: EncodeBatch, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        task_status.started()
        if not self.core.is_under_way(batch):
            return
        if not self._caller.attached:
            self.core.put_back(batch)
            self._look()
            return
        began = trio.current_time()
        patience = self._patience + MAX_UNDER_WAY * self._slowest
        try:
            with trio.move_on_after(patience) as scope:
                answer = await self._caller.call("encode", batch.columns().message())
            if scope.cancelled_caught:
                self._caller.report_fault(
                    f"the worker hasn't answered a call within {patience:.1f} s"
                )
                return
            vectors = vectors_of(answer, len(batch.texts))
        except WorkerLost:
            return  # It is judged with whatever else was under way.
        except EngineError as error:
            self.core.on_error(batch, error)
        else:
            self._slowest = max(self._slowest, trio.current_time() - began)
            self.core.on_vectors(batch, vectors)
            self._note_answer(batch, began)
        self._look()

    def _note_answer(self, batch: EncodeBatch, began: float) -> None:
        """The call of ``batch``, which was sent at ``began``, has been answered."""
        now = trio.current_time()
        # The worker makes one call after the other: waiting for the one before isn't counted.
        step_us = round((now - max(began, self._answered)) * 1e6)
        self._answered = now
        self._num_texts += len(batch.texts)
        self._num_calls += 1
        self._num_tokens += batch.num_tokens
        self._step_us += step_us
        self._metrics.observe_step(batch.num_tokens)
        if self._iterations.is_wanted:
            self._iterations.publish(self._record_of(batch, step_us, now))

    def _record_of(self, batch: EncodeBatch, step_us: int, now: float) -> Iteration:
        return Iteration(
            number=self._num_calls,
            time=now,
            num_sequences=len(batch.texts),
            num_prefills=len(batch.texts),
            num_prefill_tokens=batch.num_tokens,
            num_decode_tokens=0,
            num_tokens_sampled=0,
            num_finished=len(batch.texts),
            num_running=self.core.num_running,
            num_waiting=self.core.num_waiting,
            num_preempted=0,
            plans_in_flight=self.core.num_calls,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            pages_evicted=0,
            pages_offloaded=0,
            pages_onloaded=0,
            pages_free=0,
            pages_cached=0,
            pages_held=0,
            pages_total=0,
            host_pages_cached=0,
            host_pages_total=0,
            step_us=step_us,
            idle_us=0,
            launch_us=0,
        )

    async def compute(self, columns: Columns, tenant: str = "") -> Floats:
        """The vectors [N, dim] float32 of N texts. Leaving takes out of the queue what waits.

        Args:
            columns: the texts.
            tenant: the name under which their share of the queue counts; empty for none.

        Raises:
            QueueFull: too much waits already.
            RequestAborted: somebody has ended all requests.
            EngineError: the worker can't compute one of them.
        """
        now = trio.current_time()
        self._check_room(len(columns), len(columns.ids), tenant, now)
        ended = trio.Event()
        job = EncodeJob(columns, now, ended.set, tenant)
        self.core.submit(job)
        self._look()
        try:
            await ended.wait()
        finally:
            self.core.withdraw(job)
            self._metrics.queue_time.observe_span(job.came, job.first_called)
            self._look()
        if job.error is not None:
            raise job.error
        assert job.vectors is not None
        return job.vectors

    def _check_room(self, count: int, num_tokens: int, tenant: str, now: float) -> None:
        waiting, tokens = self.core.num_waiting, self.core.num_waiting_tokens
        recently = self._departures.note(self._num_texts, now)
        if waiting == 0:
            return  # However large it is, it finds nobody before it.
        too_many = waiting + count - self._max_waiting
        if too_many > 0:
            raise QueueFull(
                f"{waiting} texts are waiting, and this request has {count}; the limit is "
                f"{self._max_waiting} (--max-num-queued-reqs)",
                retry_after=seconds_until_room(min(too_many, waiting), *recently),
            )
        too_large = tokens + num_tokens - self._max_waiting_tokens
        if too_large > 0:
            raise QueueFull(
                f"{waiting} texts with {tokens} tokens are waiting, and this request has "
                f"{num_tokens}; the limit is {self._max_waiting_tokens} "
                "(--max-num-queued-tokens)",
                retry_after=seconds_until_room(
                    min(too_large * waiting / tokens, waiting), *recently
                ),
            )
        check_share(
            self.core.waiting_of_tenants.of(tenant),
            (count, num_tokens),
            (waiting, tokens),
            (self._max_waiting, self._max_waiting_tokens),
            recently,
        )

    def judge(self, loss: WorkerLost) -> int:
        """Why the worker was lost; see :meth:`PoolingCore.on_worker_lost`."""
        num_deaths = self.core.on_worker_lost(loss)
        self._look()
        return num_deaths

    # ---- control

    async def pause(self, holder: str) -> None:
        """Have nothing computed until :meth:`resume`; return once nothing is."""
        self.core.pause_gate.close(holder)
        await self._conditions.wait_for(lambda: self.core.is_quiet)

    async def pause_when_done(self, holder: str) -> None:
        """:meth:`pause` once all that came before this is computed. What comes after it waits.

        Cancelling it before that lets everything in again.
        """
        last = self.core.num_arrivals
        self.core.pause_gate.close_behind(holder, last)
        try:
            await self._conditions.wait_for(lambda: self.core.num_open_until(last) == 0)
        except BaseException:
            self.resume(holder)
            raise
        await self.pause(holder)

    def resume(self, holder: str) -> None:
        """``holder`` needs no pause any more. Idempotent."""
        self.core.pause_gate.release(holder)
        self._look()

    def abort_all(self) -> None:
        """End every request there is."""
        self.core.fail_all(RequestAborted("the request was aborted"))
        self._look()

    def _look(self) -> None:
        """Something has happened."""
        self._work.set()
        self._conditions.notify()

    # ---- what can be seen from outside

    def counted_in(self, statistics: SchedulerStatistics) -> SchedulerStatistics:
        """``statistics`` and what is done here: texts are sequences, calls are steps."""
        return attrs.evolve(
            statistics,
            num_waiting=statistics.num_waiting + self.core.num_waiting,
            num_running=statistics.num_running + self.core.num_running,
            num_steps=statistics.num_steps + self._num_calls,
            num_tokens_computed=statistics.num_tokens_computed + self._num_tokens,
            step_us=statistics.step_us + self._step_us,
            plans_in_flight=statistics.plans_in_flight + self.core.num_calls,
        )

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is computed."""
        return self.core.is_empty

    def check_integrity(self) -> None:
        """Assert the invariants of the core."""
        self.core.check_integrity()


def supervised_batcher(
    config: EngineConfig, scheduler: Scheduler, supervisor: Supervisor, metrics: Metrics
) -> Batcher:
    """A batcher over the workers of ``supervisor``, which asks it, too, why one was lost."""
    batcher = Batcher(
        scheduler,
        metrics,
        scheduler.feeds.iterations.feed,
        max_waiting=config.max_num_queued_reqs,
        max_waiting_tokens=config.max_num_queued_tokens or DEFAULT_MAX_TOKENS,
        patience=config.watchdog_timeout,
    )
    judge = supervisor.judge
    # Each counts the deaths since a progress of its own kind; whichever came last counts.
    supervisor.judge = lambda loss: min(judge(loss), batcher.judge(loss))
    return batcher
