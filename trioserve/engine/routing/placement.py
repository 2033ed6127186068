"""The places of requests: on which of an engine's schedulers each is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

from trioserve.engine.routing.policy import Policy
from trioserve.engine.routing.router import Router
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.requests.request import Finish, FinishReason, Request
from trioserve.scheduler.moving import fits, movable
from trioserve.scheduler.scheduler import Scheduler


class Placement:
    """The schedulers of an engine, and the requests that are placed on them.

    Args:
        schedulers: One for each worker.
        policy: The choice of a worker for each request.
    """

    def __init__(self, schedulers: Iterable[Scheduler], policy: Policy) -> None:
        self.schedulers: tuple[Scheduler, ...] = ()
        """The schedulers whose workers serve, or will again."""
        self.gone: list[Scheduler] = []
        """Schedulers whose workers are gone for good; their counts go on counting."""
        self._router = Router(policy)
        self._retiring: set[Scheduler] = set()
        """Schedulers on which nothing more is placed."""
        for each in schedulers:
            self.add(each)

    def place(self, request: Request) -> Scheduler:
        """Return the scheduler for a tokenized request: of a worker that is there, if one is."""
        if not self._retiring:
            return self._router.place(request)
        staying = [each for each in self.schedulers if each not in self._retiring]
        return self._router.place(request, [each for each in staying if each.attached] or staying)

    def move_requests(self, lost: Scheduler, *, must_leave: bool = False) -> None:
        """Hand the requests of a worker that was lost, or is to be removed, to the others.

        Those that ``must_leave`` it may wait for a worker that is being replaced.
        """
        if lost.core is None:
            return
        for request in movable(lost.core):
            able = [each for each in self.schedulers if self._may_take(each, lost, request)]
            others = [each for each in able if each.attached] or (able if must_leave else [])
            if others:
                adapter = lost.adapters.held(request.adapter)
                moving = lost.take_out(request)  # which counts what was cached where it was placed
                request.scheduler = other = self._router.place(request, others)
                other.adapters.hold(adapter)
                other.take_in(moving)

    async def vacate(self, scheduler: Scheduler, holder: str) -> None:
        """Pause ``scheduler`` under the key ``holder``, and move its requests to the others.

        Requests that may not move stay. It is to be used within :meth:`avoiding` or
        :meth:`retiring`. Cancelling this leaves the pause in place.
        """
        scheduler.pause_control.close(holder, retract=True)
        await scheduler.pause_control.wait_drained()
        self.move_requests(scheduler)

    def _may_take(self, other: Scheduler, lost: Scheduler, request: Request) -> bool:
        if other is lost or other in self._retiring:
            return False
        return other.core is not None and fits(other.core, request)

    def add(self, scheduler: Scheduler) -> None:
        """Place requests on one more scheduler."""
        scheduler.on_loss = functools.partial(self.move_requests, scheduler)
        self.schedulers = (*self.schedulers, scheduler)
        self._router.add(scheduler)

    @contextlib.contextmanager
    def avoiding(self, scheduler: Scheduler) -> Iterator[None]:
        """Place nothing on ``scheduler`` in the block, unless it is or becomes the last one."""
        if set(self.schedulers) - self._retiring - {scheduler}:
            self._retiring.add(scheduler)
        try:
            yield
        finally:
            self._retiring.discard(scheduler)

    @contextlib.contextmanager
    def retiring(self, scheduler: Scheduler) -> Iterator[None]:
        """Place nothing on ``scheduler`` in the block; remove it at the end, unless it fails.

        Raises:
            InvalidRequest: It is the last one, because the others were given up meanwhile.
        """
        with self.avoiding(scheduler):
            yield
            if scheduler not in self._retiring:
                raise InvalidRequest("the last worker can't be removed", param="index")
            self._remove(scheduler)
            scheduler.adapters.close()

    def give_up(self, scheduler: Scheduler, reason: str) -> bool:
        """Go on without a worker that isn't replaced any more; return False if it was the last one.

        Its requests go to the others. Those that may have ended it fail. A worker that was to be
        removed stays if no other one is left.
        """
        others = {each for each in self.schedulers if each is not scheduler}
        if not others:
            return False
        if others <= self._retiring:
            self._retiring -= others
        self.move_requests(scheduler, must_leave=True)
        self._remove(scheduler)
        scheduler.adapters.close()
        if scheduler.core is not None:
            error = EngineError(f"the worker of this request was given up: {reason}")
            for request in scheduler.core.unfinished_requests():
                for sequence in request.sequences:
                    scheduler.abort(sequence, Finish(FinishReason.ERROR, error=error))
        return True

    def _remove(self, scheduler: Scheduler) -> None:
        if scheduler in self.schedulers:
            self.schedulers = tuple(each for each in self.schedulers if each is not scheduler)
            self.gone.append(scheduler)
            self._router.remove(scheduler)
