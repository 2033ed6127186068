"""Which texts go into the next call to the worker, and whose fault it is when that fails.

A state machine without a task, I/O or a clock. Whatever waits goes into the next call, first come,
first served, as many texts and tokens as the limits allow. Two calls may be under way, so that the
worker finds the next one when it is done.

When a worker dies, every text that was under way is suspected: the suspects are tried in halves,
nothing else beside them, until they have been computed or one was alone at two deaths. A call that
fails without a death is taken apart in the same way, and a text that fails alone is to blame at
once. A worker that was killed from outside makes nobody a suspect.
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
"""Calls: one that the worker computes, and the next."""
MAX_DEATHS = 2
"""Of workers that had nothing but one text to compute, after which that is to blame."""

Floats = npt.NDArray[np.float32]


@attrs.define(eq=False)
class Text:
    """One text of a job."""

    job: EncodeJob
    index: int
    num_tokens: int
    num_deaths: int = 0
    """Workers that died when they had nothing else to compute."""


@attrs.define(eq=False)
class EncodeJob:
    """What one request wants to know: a vector for each of its texts.

    Args:
        columns: the texts.
        came: when, in seconds on trio's clock.
        on_end: called when all vectors are there, or ``error`` is.
        tenant: the name under which its share of the queue counts; empty for none.
    """

    columns: Columns
    came: float
    on_end: Callable[[], None]
    tenant: str = ""
    arrival: int = 0
    """Its place in the order of arrival."""
    first_called: float | None = None
    """When its first text went into a call."""
    vectors: Floats | None = None
    """[N, dim], filled row by row."""
    error: TrioserveError | None = None
    has_left: bool = False
    """Whether nobody wants anything of it any more."""
    num_missing: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: len(self.columns), takes_self=True)
    )

    @property
    def is_open(self) -> bool:
        """Whether something is still to be computed for it."""
        return self.num_missing > 0 and self.error is None and not self.has_left

    def take(self, index: int, vector: Floats) -> None:
        """Text ``index`` has that ``vector`` [dim]."""
        if not self.is_open:
            return
        if self.vectors is None:
            self.vectors = np.empty((len(self.columns), len(vector)), dtype=np.float32)
        self.vectors[index] = vector
        self.num_missing -= 1
        if self.num_missing == 0:
            self.on_end()

    def fail(self, error: TrioserveError) -> None:
        """End it with ``error``, unless it has ended."""
        if self.is_open:
            self.error = error
            self.on_end()


@attrs.define(eq=False)
class EncodeBatch:
    """The texts of one call; on ``trial`` it has the worker to itself."""

    texts: list[Text]
    trial: bool = False

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(text.num_tokens for text in self.texts)

    def columns(self) -> Columns:
        """What the worker is called with."""
        return Columns.joined(text.job.columns.text(text.index) for text in self.texts)


class PoolingCore:
    """Everything that waits for the worker or is under way there.

    Args:
        max_texts: in one call.
        max_tokens: in one call. A text that is longer goes by itself.
    """

    def __init__(self, max_texts: int, max_tokens: int) -> None:
        self.max_texts = max_texts
        self.max_tokens = max_tokens
        self.pause_gate = PauseGate()
        """What keeps those who wait from being computed."""
        self.num_arrivals = 0
        """Jobs that ever came."""
        self.num_waiting = 0
        """Texts that aren't under way."""
        self.num_waiting_tokens = 0
        self.waiting_of_tenants = TenantCounts()
        """Of texts that aren't under way, and of their tokens."""
        self._line: dict[EncodeJob, deque[Text]] = {}
        """What waits, by the order of arrival."""
        self._trials: deque[list[Text]] = deque()
        """Suspects, each list to be computed by itself."""
        self._under_way: list[EncodeBatch] = []
        self._num_deaths = 0
        """Since there was progress."""
        self._fewest_suspects = 0
        """At those deaths; 0 for none."""

    # ---- jobs come and go

    def submit(self, job: EncodeJob) -> None:
        """Put all texts of ``job`` in line."""
        self.num_arrivals += 1
        job.arrival = self.num_arrivals
        lengths = np.diff(job.columns.ends).tolist()
        self._line[job] = deque(Text(job, index, length) for index, length in enumerate(lengths))
        self._count(self._line[job], 1)

    def withdraw(self, job: EncodeJob) -> None:
        """Nothing more is wanted of ``job``. Idempotent; what is under way is computed."""
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
        self._count(self._line.pop(job, ()), -1)
        leaving = [text for trial in self._trials for text in trial if text.job is job]
        if leaving:
            self._count(leaving, -1)
            kept = ([text for text in trial if text.job is not job] for trial in self._trials)
            self._trials = deque(filter(None, kept))
            self._note_progress()  # There are fewer suspects.

    def _count(self, texts: Iterable[Text], sign: int) -> None:
        """``texts`` wait now, or don't any more."""
        for text in texts:
            self.num_waiting += sign
            self.num_waiting_tokens += sign * text.num_tokens
            self.waiting_of_tenants.add(text.job.tenant, sign, sign * text.num_tokens)

    # ---- calls

    def next_batch(self, now: float) -> EncodeBatch | None:
        """What the worker is to be called with next; None if nothing, or enough is under way."""
        if self.pause_gate.is_closed:
            return None
        trial = bool(self._trials)
        if trial:
            texts = [] if self._under_way else self._trials.popleft()
        elif len(self._under_way) < MAX_UNDER_WAY and not any(b.trial for b in self._under_way):
            texts = self._take_from_line()
        else:
            texts = []
        if not texts:
            return None
        self._count(texts, -1)
        for text in texts:
            if text.job.first_called is None:
                text.job.first_called = now
        batch = EncodeBatch(texts, trial)
        self._under_way.append(batch)
        return batch

    def _take_from_line(self) -> list[Text]:
        taken: list[Text] = []
        num_tokens = 0
        for job, texts in list(self._line.items()):
            if not self.pause_gate.admits(job.arrival):
                continue
            while texts:
                num_tokens += texts[0].num_tokens
                if taken and (len(taken) == self.max_texts or num_tokens > self.max_tokens):
                    return taken
                taken.append(texts.popleft())
            del self._line[job]
        return taken

    def on_vectors(self, batch: EncodeBatch, vectors: Floats) -> None:
        """The worker has answered ``batch`` with ``vectors`` [len(batch.texts), dim]."""
        self._under_way.remove(batch)
        self._note_progress()
        for text, vector in zip(batch.texts, vectors, strict=True):
            text.job.take(text.index, vector)

    def on_error(self, batch: EncodeBatch, error: EngineError) -> None:
        """The worker couldn't compute ``batch``, and lives."""
        self._under_way.remove(batch)
        texts = [text for text in batch.texts if text.job.is_open]
        if len(texts) == 1:
            self._fail(texts[0].job, _fault_isolation(error))
        else:
            self._try_halves(texts)

    def is_under_way(self, batch: EncodeBatch) -> bool:
        """Whether ``batch`` is still to be answered: the worker hasn't been lost since it went."""
        return batch in self._under_way

    def put_back(self, batch: EncodeBatch) -> None:
        """``batch`` was never given to a worker."""
        self._under_way.remove(batch)
        self._return(batch.texts)

    def on_worker_lost(self, loss: WorkerLost) -> int:
        """The worker is gone, and whatever was under way with it.

        Returns:
            how many were lost, this one included, since there was progress: an answer, fewer
            suspects, or one found.
        """
        texts = [text for batch in self._under_way for text in batch.texts if text.job.is_open]
        have_left = bool(self._under_way) and not texts
        self._under_way.clear()
        if have_left and not loss.from_outside:
            self._note_progress()  # Whoever may be to blame isn't there any more.
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
            self._try_halves(texts)
            return num_deaths
        (text,) = texts
        text.num_deaths += 1
        if text.num_deaths < MAX_DEATHS:
            self._try([texts])
        else:
            self._fail(text.job, _fault_isolation(loss))
            self._note_progress()
        return num_deaths

    def _note_progress(self) -> None:
        self._num_deaths = self._fewest_suspects = 0

    def _try_halves(self, texts: list[Text]) -> None:
        half = (len(texts) + 1) // 2
        self._try([texts[:half], texts[half:]])

    def _try(self, trials: list[list[Text]]) -> None:
        """Compute each of ``trials`` by itself, before anything else."""
        for trial in reversed(trials):
            if trial:
                self._trials.appendleft(trial)
                self._count(trial, 1)

    def _return(self, texts: Iterable[Text]) -> None:
        """Put ``texts`` back at the front of the line."""
        texts = [text for text in texts if text.job.is_open]
        self._count(texts, 1)
        returned: dict[EncodeJob, deque[Text]] = {}
        for text in texts:
            returned.setdefault(text.job, deque()).append(text)
        for job, rest in self._line.items():
            returned.setdefault(job, deque()).extend(rest)
        self._line = returned

    # ---- what can be seen from outside

    @property
    def num_running(self) -> int:
        """Texts that are under way."""
        return sum(len(batch.texts) for batch in self._under_way)

    @property
    def num_calls(self) -> int:
        """Calls that are under way."""
        return len(self._under_way)

    @property
    def is_quiet(self) -> bool:
        """Whether no call is under way."""
        return not self._under_way

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits and no call is under way."""
        return not self._under_way and self.num_waiting == 0

    def num_open_until(self, arrival: int) -> int:
        """How many of the jobs that came no later than ``arrival`` are still to be computed."""
        return sum(job.arrival <= arrival for job in self._jobs() if job.is_open)

    def check_integrity(self) -> None:
        """Assert that the counts are those of what waits, and that only open jobs do."""
        waiting = list(itertools.chain(*self._line.values(), *self._trials))
        assert self.num_waiting == len(waiting)
        assert self.num_waiting_tokens == sum(text.num_tokens for text in waiting)
        tenants = TenantCounts()
        for text in waiting:
            tenants.add(text.job.tenant, 1, text.num_tokens)
        assert self.waiting_of_tenants == tenants
        assert all(text.job.is_open for text in waiting)
        assert all(self._line.values())
        assert len(self._under_way) <= MAX_UNDER_WAY

    def _jobs(self) -> list[EncodeJob]:
        under_way = (batch.texts for batch in self._under_way)
        texts = itertools.chain(*self._trials, *under_way)
        return list(dict.fromkeys(itertools.chain(self._line, (text.job for text in texts))))


def _fault_isolation(reason: Exception) -> EngineError:
    return EngineError(f"the worker failed on this text: {reason}")
