"""The task that has texts computed: all waiting texts go into the worker's next call."""

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
    """The part of :class:`~trioserve.scheduler.scheduler.Scheduler` that a batcher needs."""

    @property
    def attached(self) -> bool:
        """True while a worker is attached."""

    async def wait_attached(self) -> None:
        """Block until a worker is attached."""

    async def call(self, name: str, arguments: object = None) -> Any:
        """Call the worker by name; raise ``EngineError`` or ``WorkerLost``."""

    def report_fault(self, reason: str) -> None:
        """Treat the attached worker as hung, so that it is replaced."""


class Batcher:
    """The jobs of all requests; they outlive workers.

    Args:
        caller: Calls the worker.
        metrics: Counts calls, and the time that requests wait for theirs.
        iterations: Feed that gets a record of each call.
        max_waiting: Most texts that may wait.
        max_waiting_tokens: Most tokens of waiting texts.
        patience: Seconds that a call may take beyond the slowest so far; 0 for no limit.
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
        """Seconds that the slowest call has taken since it was sent."""
        self.core = PoolingCore(max_texts=1, max_tokens=1)
        self._work = trio.Event()
        """Set when the worker may have to be called."""
        self._conditions = Conditions()
        self._departures = Departures()
        self._num_texts = 0
        """Number of texts in all answers; the next three count the same answers."""
        self._num_calls = 0
        self._num_tokens = 0
        self._step_us = 0
        self._answered = 0.0
        """Time of the last answer, in seconds on trio's clock."""

    def set_limits(self, ready: wire.Ready) -> None:
        """Set the limits of one call from a worker's capacity."""
        self.core.max_texts = ready.max_num_seqs
        self.core.max_tokens = ready.max_num_batched_tokens

    async def run(self) -> None:
        """Run the task: call workers until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._caller.wait_attached()
                self._work = trio.Event()  # Replaced before looking, so that no change is missed.
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
            self._notify()
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
            return  # The loss is judged with all other calls under way.
        except EngineError as error:
            self.core.on_error(batch, error)
        else:
            self._slowest = max(self._slowest, trio.current_time() - began)
            self.core.on_vectors(batch, vectors)
            self._note_answer(batch, began)
        self._notify()

    def _note_answer(self, batch: EncodeBatch, began: float) -> None:
        """Count the answer to ``batch``, which was sent at ``began``."""
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
        """Return the vectors [N, dim] float32 of N texts. Cancelling removes texts that still wait.

        Args:
            columns: The texts.
            tenant: Name under which their share of the queue counts; empty for none.

        Raises:
            QueueFull: Too much is waiting already.
            RequestAborted: All requests were aborted.
            EngineError: The worker can't compute one of the texts.
        """
        now = trio.current_time()
        self._check_room(len(columns), len(columns.ids), tenant, now)
        ended = trio.Event()
        job = EncodeJob(columns, now, ended.set, tenant)
        self.core.submit(job)
        self._notify()
        try:
            await ended.wait()
        finally:
            self.core.withdraw(job)
            self._metrics.queue_time.observe_span(job.came, job.first_called)
            self._notify()
        if job.error is not None:
            raise job.error
        assert job.vectors is not None
        return job.vectors

    def _check_room(self, count: int, num_tokens: int, tenant: str, now: float) -> None:
        waiting, tokens = self.core.num_waiting, self.core.num_waiting_tokens
        recently = self._departures.note(self._num_texts, now)
        if waiting == 0:
            return  # A request of any size may enter an empty queue.
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
        """Judge why the worker was lost; see :meth:`PoolingCore.on_worker_lost`."""
        num_deaths = self.core.on_worker_lost(loss)
        self._notify()
        return num_deaths

    # ---- control

    def close(self, holder: str) -> None:
        """Make no more calls until :meth:`resume`."""
        self.core.pause_gate.close(holder)

    async def wait_drained(self) -> None:
        """Block until no call is under way."""
        await self._conditions.wait_for(lambda: self.core.is_drained)

    def close_behind(self, holder: str) -> int:
        """Hold back all later requests until :meth:`resume`; return the number of the last one."""
        self.core.pause_gate.close_behind(holder, self.core.num_arrivals)
        return self.core.num_arrivals

    def has_finished(self, last: int) -> bool:
        """Return True if all requests up to the one of that number are computed."""
        return self.core.num_open_until(last) == 0

    async def wait_finished(self, last: int) -> None:
        """Block until all requests up to the one of that number are computed."""
        await self._conditions.wait_for(lambda: self.has_finished(last))

    def resume(self, holder: str) -> None:
        """End the pause of that key. Idempotent."""
        self.core.pause_gate.release(holder)
        self._notify()

    def abort_all(self) -> None:
        """Abort all requests."""
        self.core.fail_all(RequestAborted("the request was aborted"))
        self._notify()

    def _notify(self) -> None:
        """Wake the task and all waits after a change of the state."""
        self._work.set()
        self._conditions.notify()

    # ---- observation

    def counted_in(self, statistics: SchedulerStatistics) -> SchedulerStatistics:
        """Return ``statistics`` plus the work done here: texts as sequences, calls as steps."""
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
    def attached(self) -> bool:
        """True while its worker is there."""
        return self._caller.attached

    @property
    def idle(self) -> bool:
        """True if no text waits and no call is under way."""
        return self.core.is_empty

    def check_integrity(self) -> None:
        """Assert the invariants of the core."""
        self.core.check_integrity()


def supervised_batcher(
    config: EngineConfig, scheduler: Scheduler, supervisor: Supervisor, metrics: Metrics
) -> Batcher:
    """Return a batcher over the workers of ``supervisor``, which asks it, too, to judge losses."""
    batcher = Batcher(
        scheduler,
        metrics,
        scheduler.feeds.iterations.feed,
        max_waiting=config.max_num_queued_reqs,
        max_waiting_tokens=config.max_num_queued_tokens or DEFAULT_MAX_TOKENS,
        patience=config.watchdog_timeout,
    )
    judge = supervisor.judge
    # Each counts deaths since its own kind of progress; the latest progress counts.
    supervisor.judge = lambda loss: min(judge(loss), batcher.judge(loss))
    return batcher
