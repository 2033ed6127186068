"""Workers that got none of many requests: the times of their steps aren't believed any more.

A worker's times are learned from its own steps. If they were bad for a while, others get all
requests, and nothing shows that it is faster now. So it is taken to be a little faster than the
worker that got the latest request, until it gets one. If both are idle, it gets the next.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

import attrs

from trioserve.scheduler.step_time import StepTimeModel

PASSED_OVER = 32
"""Requests for each worker, after which the times of those that got none are no longer believed."""

HOPE = 0.9
"""Times that a worker is taken to have then, by those of the worker that got the latest request."""

Worker = TypeVar("Worker")


@attrs.define
class PassedOver(Generic[Worker]):
    """The requests that were placed, and the latest one of each worker."""

    _num_placed: int = 0
    _latest: dict[Worker, int] = attrs.field(factory=dict)

    def note(self, chosen: Worker, workers: Collection[Worker]) -> list[Worker]:
        """Count a request for ``chosen``; return those of ``workers`` that got none for long."""
        self._num_placed += 1
        self._latest[chosen] = self._num_placed
        number = PASSED_OVER * len(workers)
        if self._num_placed % number:
            return []
        since = self._num_placed - number
        return [each for each in workers if self._latest.get(each, 0) <= since]

    def forget(self, worker: Worker) -> None:
        """Forget a worker that is gone."""
        self._latest.pop(worker, None)


def hoped_for(times: StepTimeModel) -> StepTimeModel:
    """Return the times that a worker is taken to have, beside one with ``times``."""
    hoped = StepTimeModel()
    hoped.coefficients = [HOPE * each for each in times.coefficients]
    return hoped
