"""The state machine of pooling: it chooses the texts of each call, and finds culprits.

It has no task, I/O or clock. All waiting texts go into the next call, first come, first served, as
many texts and tokens as the limits allow. Two calls may be under way, so that the worker finds the
next one when it is done with the first.

When a worker dies, every text under way becomes a suspect. Suspects go on probation in halves, each
half alone on the worker, until they have been computed or one was alone at two deaths. A call that
fails without a death is divided in the same way, but a text that fails alone is the culprit at
once. A worker that was killed from outside makes no text a suspect.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.pooling.columns import Columns
from trioserve.protocol.errors import EngineError, TrioserveError, WorkerLost
from trioserve.requests.tenants import TenantCounts
from trioserve.scheduler.pause_gate import PauseGate

MAX_UNDER_WAY = 2
"""Most calls under way: one that the worker computes, and the next."""
MAX_DEATHS = 2
"""Deaths of workers with a single text under way after which that text is the culprit."""

Floats = npt.NDArray[np.float32]


@attrs.define(eq=False)
class Text:
    """One text of a job."""

    job: EncodeJob
    index: int
    num_tokens: int
    num_deaths: int = 0
    """Workers that died when they had no other text to compute."""


@attrs.define(eq=False)
class EncodeJob:
    """The vectors that one request wants: one for each of its texts.

    Args:
        columns: The texts.
        came: Time of arrival, in seconds on trio's clock.
        on_end: Called when all vectors, or an ``error``, are there.
        tenant: Name under which its share of the queue counts; empty for none.
    """

    columns: Columns
    came: float
    on_end: Callable[[], None]
    tenant: str = ""
    arrival: int = 0
    """Arrival number."""
    first_called: float | None = None
    """Time when its first text went into a call."""
    vectors: Floats | None = None
    """[N, dim], filled row by row."""
    error: TrioserveError | None = None
    has_left: bool = False
    """True if its caller has left."""
    num_missing: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: len(self.columns), takes_self=True)
    )

    @property
    def is_open(self) -> bool:
        """True while part of it is to be computed."""
        return self.num_missing > 0 and self.error is None and not self.has_left

    def take(self, index: int, vector: Floats) -> None:
        """Store the ``vector`` [dim] of text ``index``."""
        if not self.is_open:
            return
        if self.vectors is None:
            self.vectors = np.empty((len(self.columns), len(vector)), dtype=np.float32)
        self.vectors[index] = vector
        self.num_missing -= 1
        if self.num_missing == 0:
            self.on_end()

    def fail(self, error: TrioserveError) -> None:
        """End the job with ``error``, unless it has ended."""
        if self.is_open:
            self.error = error
            self.on_end()


@attrs.define(eq=False)
class EncodeBatch:
    """The texts of one call; ``on_probation`` they have the worker to themselves."""

    texts: list[Text]
    on_probation: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts."""
        return sum(text.num_tokens for text in self.texts)

    def columns(self) -> Columns:
        """Return the columns to call the worker with."""
        return Columns.joined(text.job.columns.text(text.index) for text in self.texts)


class PoolingCore:
    """The texts that wait for the worker or are under way.

    Args:
        max_texts: Most texts in one call.
        max_tokens: Most tokens in one call. A longer text goes by itself.
    """

    def __init__(self, max_texts: int, max_tokens: int) -> None:
        self.max_texts = max_texts
        self.max_tokens = max_tokens
        self.pause_gate = PauseGate()
        """Pauses, which keep waiting texts from being computed."""
        self.num_arrivals = 0
        """Number of jobs ever submitted."""
        self.num_waiting = 0
        """Number of texts that wait."""
        self.num_waiting_tokens = 0
        self.waiting_of_tenants = TenantCounts()
        """Waiting texts and their tokens, by tenant."""
        self._queue: dict[EncodeJob, deque[Text]] = {}
        """Waiting texts, by job in the order of arrival."""
        self._groups: deque[list[Text]] = deque()
        """Suspects; each list is computed by itself."""
        self._under_way: list[EncodeBatch] = []
        self._num_deaths = 0
        """Deaths of workers since there was progress."""
        self._fewest_suspects = 0
        """Smallest number of suspects at those deaths; 0 for none."""

    # ---- submission and withdrawal

    def submit(self, job: EncodeJob) -> None:
        """Queue all texts of ``job``."""
        self.num_arrivals += 1
        job.arrival = self.num_arrivals
        lengths = np.diff(job.columns.ends).tolist()
        self._queue[job] = deque(Text(job, index, length) for index, length in enumerate(lengths))
        self._count(self._queue[job], 1)

    def withdraw(self, job: EncodeJob) -> None:
        """Withdraw ``job``. Idempotent; texts under way are computed."""
        job.has_left = True
        self._forget(job)

    def fail_all(self, error: TrioserveError) -> None:
        """End every job with ``error``."""
        for job in self._jobs():
            self._fail(job, error)

    def _fail(self, job: EncodeJob, error: TrioserveError) -> None:
        job.fail(error)
        self._forget(job)

    def _forget(self, job: EncodeJob) -> None:
        self._count(self._queue.pop(job, ()), -1)
        leaving = [text for group in self._groups for text in group if text.job is job]
        if leaving:
            self._count(leaving, -1)
            kept = ([text for text in group if text.job is not job] for group in self._groups)
            self._groups = deque(filter(None, kept))
            self._note_progress()  # There are fewer suspects.

    def _count(self, texts: Iterable[Text], sign: int) -> None:
        """Count that ``texts`` begin (1) or cease (-1) to wait."""
        for text in texts:
            self.num_waiting += sign
            self.num_waiting_tokens += sign * text.num_tokens
            self.waiting_of_tenants.add(text.job.tenant, sign, sign * text.num_tokens)

    # ---- calls

    def next_batch(self, now: float) -> EncodeBatch | None:
        """Return the texts of the next call; None if there are none or enough is under way."""
        if self.pause_gate.is_closed:
            return None
        on_probation = bool(self._groups)
        if on_probation:
            texts = [] if self._under_way else self._groups.popleft()
        elif len(self._under_way) < MAX_UNDER_WAY and not any(
            b.on_probation for b in self._under_way
        ):
            texts = self._take_from_queue()
        else:
            texts = []
        if not texts:
            return None
        self._count(texts, -1)
        for text in texts:
            if text.job.first_called is None:
                text.job.first_called = now
        batch = EncodeBatch(texts, on_probation)
        self._under_way.append(batch)
        return batch

    def _take_from_queue(self) -> list[Text]:
        taken: list[Text] = []
        num_tokens = 0
        for job, texts in list(self._queue.items()):
            if not self.pause_gate.admits(job.arrival):
                continue
            while texts:
                num_tokens += texts[0].num_tokens
                if taken and (len(taken) == self.max_texts or num_tokens > self.max_tokens):
                    return taken
                taken.append(texts.popleft())
            del self._queue[job]
        return taken

    def on_vectors(self, batch: EncodeBatch, vectors: Floats) -> None:
        """Take the answer ``vectors`` [len(batch.texts), dim] to ``batch``."""
        self._under_way.remove(batch)
        self._note_progress()
        for text, vector in zip(batch.texts, vectors, strict=True):
            text.job.take(text.index, vector)

    def on_error(self, batch: EncodeBatch, error: EngineError) -> None:
        """Handle the error of ``batch`` on a worker that lives."""
        self._under_way.remove(batch)
        texts = [text for text in batch.texts if text.job.is_open]
        if len(texts) == 1:
            self._fail(texts[0].job, _culprit_error(error))
        else:
            self._try_in_halves(texts)

    def is_under_way(self, batch: EncodeBatch) -> bool:
        """Return True if ``batch`` is under way: no worker was lost since it was sent."""
        return batch in self._under_way

    def put_back(self, batch: EncodeBatch) -> None:
        """Queue ``batch`` again, which was never sent to a worker."""
        self._under_way.remove(batch)
        self._return(batch.texts)

    def on_worker_lost(self, loss: WorkerLost) -> int:
        """Handle the loss of the worker and of all calls under way.

        Returns:
            The number of workers lost since there was progress, this one included. Progress is an
            answer, fewer suspects, or a culprit found.
        """
        texts = [text for batch in self._under_way for text in batch.texts if text.job.is_open]
        have_left = bool(self._under_way) and not texts
        self._under_way.clear()
        if have_left and not loss.from_outside:
            self._note_progress()  # The culprit, if there was one, has left.
        if loss.from_outside or not texts:
            self._return(texts)
            self._num_deaths += 1
            return self._num_deaths
        if not self._fewest_suspects or len(texts) < self._fewest_suspects:
            self._num_deaths = 0
            self._fewest_suspects = len(texts)
        self._num_deaths += 1
        num_deaths = self._num_deaths
        if len(texts) > 1:
            self._try_in_halves(texts)
            return num_deaths
        (text,) = texts
        text.num_deaths += 1
        if text.num_deaths < MAX_DEATHS:
            self._try([texts])
        else:
            self._fail(text.job, _culprit_error(loss))
            self._note_progress()
        return num_deaths

    def _note_progress(self) -> None:
        self._num_deaths = self._fewest_suspects = 0

    def _try_in_halves(self, texts: list[Text]) -> None:
        half = (len(texts) + 1) // 2
        self._try([texts[:half], texts[half:]])

    def _try(self, groups: list[list[Text]]) -> None:
        """Put each of ``groups`` on probation, before any other text is computed."""
        for group in reversed(groups):
            if group:
                self._groups.appendleft(group)
                self._count(group, 1)

    def _return(self, texts: Iterable[Text]) -> None:
        """Queue ``texts`` again, at the front."""
        texts = [text for text in texts if text.job.is_open]
        self._count(texts, 1)
        returned: dict[EncodeJob, deque[Text]] = {}
        for text in texts:
            returned.setdefault(text.job, deque()).append(text)
        for job, rest in self._queue.items():
            returned.setdefault(job, deque()).extend(rest)
        self._queue = returned

    # ---- observation

    @property
    def num_running(self) -> int:
        """Number of texts under way."""
        return sum(len(batch.texts) for batch in self._under_way)

    @property
    def num_calls(self) -> int:
        """Number of calls under way."""
        return len(self._under_way)

    @property
    def is_drained(self) -> bool:
        """True if no call is under way."""
        return not self._under_way

    @property
    def is_empty(self) -> bool:
        """True if no text waits and no call is under way."""
        return not self._under_way and self.num_waiting == 0

    def num_open_until(self, arrival: int) -> int:
        """Return the number of open jobs that arrived no later than ``arrival``."""
        return sum(job.arrival <= arrival for job in self._jobs() if job.is_open)

    def check_integrity(self) -> None:
        """Assert that the counts are right, and that only texts of open jobs wait."""
        waiting = list(itertools.chain(*self._queue.values(), *self._groups))
        assert self.num_waiting == len(waiting)
        assert self.num_waiting_tokens == sum(text.num_tokens for text in waiting)
        tenants = TenantCounts()
        for text in waiting:
            tenants.add(text.job.tenant, 1, text.num_tokens)
        assert self.waiting_of_tenants == tenants
        assert all(text.job.is_open for text in waiting)
        assert all(self._queue.values())
        assert len(self._under_way) <= MAX_UNDER_WAY

    def _jobs(self) -> list[EncodeJob]:
        under_way = (batch.texts for batch in self._under_way)
        texts = itertools.chain(*self._groups, *under_way)
        return list(dict.fromkeys(itertools.chain(self._queue, (text.job for text in texts))))


def _culprit_error(reason: Exception) -> EngineError:
    return EngineError(f"the worker failed on this text: {reason}")
