"""The places of requests: on which of an engine's schedulers each is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from trioserve.engine.routing.policy import Policy
from trioserve.engine.routing.router import Router
from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.joining import WorkerRole
from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.requests.request import Finish, FinishReason, Request
from trioserve.scheduler.handing_over import vacate
from trioserve.scheduler.moving import fits, movable
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.sequence_state import SequenceState


class Placement:
    """The schedulers of an engine, and the requests that are placed on them.

    Args:
        policy: The choice of a worker for each request.
        splits_by_load: True to let the loads decide for each request whether its prompt is computed
            on another worker than its output.
    """

    def __init__(self, policy: Policy, *, splits_by_load: bool = False) -> None:
        self.schedulers: tuple[Scheduler, ...] = ()
        """The schedulers whose workers serve, or will again."""
        self.gone: list[Scheduler] = []
        """Schedulers whose workers are gone for good; their counts go on counting."""
        self._splits_by_load = splits_by_load
        self._roles: dict[Scheduler, WorkerRole] = {}
        """Roles of the workers that don't do both."""
        self._router = Router(policy)
        self._retiring: set[Scheduler] = set()
        """Schedulers on which nothing more is placed."""

    def place(self, request: Request) -> Scheduler:
        """Return the scheduler for a tokenized request: of a worker that is there, if one is."""
        staying = self.schedulers
        if self._retiring:
            staying = tuple(each for each in staying if each not in self._retiring)
        suited = self._suited(request, staying)
        among = None if suited == self.schedulers else _attached(suited)
        may_split = self._splits_by_load and not request.params.beam_width
        scheduler = self._router.place(request, among, may_split=may_split)
        request.hands_over |= self._hands_over(scheduler, request)
        return scheduler

    def role_of(self, scheduler: Scheduler) -> WorkerRole:
        """Return the part of each request that a scheduler's worker computes."""
        return self._roles.get(scheduler, "both")

    def set_role(self, scheduler: Scheduler, role: WorkerRole) -> None:
        """Place requests by that role from here on."""
        if role == "both":
            self._roles.pop(scheduler, None)
        else:
            self._roles[scheduler] = role

    def _suited(self, request: Request, schedulers: tuple[Scheduler, ...]) -> tuple[Scheduler, ...]:
        """Return those whose workers compute what comes next of the request; all if there are none.

        Beams stay where they begin, so they begin where they are computed.
        """
        if not self._roles:
            return schedulers
        other = "prefill" if _has_begun(request) or request.params.beam_width else "decode"
        roles = {each: self.role_of(each) for each in schedulers}
        suited = tuple(each for each, role in roles.items() if role != other)
        return suited if any(each.attached for each in suited) else schedulers

    def move_requests(self, lost: Scheduler, *, must_leave: bool = False) -> None:
        """Hand the requests of a worker that was lost, or is to be removed, to the others.

        Those that ``must_leave`` it may wait for a worker that is being replaced.
        """
        if lost.core is None:
            return
        for request in movable(lost.core):
            able = self._able(lost, request)
            if any(each.attached for each in able) or (able and must_leave):
                self._move(request, lost, able)

    def hand_over(self, holder: Scheduler, request: Request) -> bool:
        """Move a request whose prompt is computed to a worker that decodes.

        Return False if there is none.
        """
        core = holder.core
        assert core is not None
        able = self._able_to_decode(holder, request)
        if request in core.fault_isolation.suspects or not any(each.attached for each in able):
            return False
        vacate(core, request)
        core.counters.num_handed_over += 1
        self._move(request, holder, able)
        return True

    def send_ahead(self, holder: Scheduler, seq_state: SequenceState) -> None:
        """Have pages of a prompt fetched by the worker that will probably go on with it."""
        request, siblings = seq_state.sequence.request, holder.feeds.siblings
        able = [each for each in self._able_to_decode(holder, request) if each.attached]
        if siblings is None or seq_state.namespace is None or not able:
            return
        other = self._router.foresee(request, able)
        core = None if other is None else other.core
        if core is not None:
            column = seq_state.known_column()[: TOKEN_BYTES * seq_state.planned]
            siblings.send_ahead(core.memory, seq_state.namespace, column, core.step_times)

    def _hands_over(self, scheduler: Scheduler, request: Request) -> bool:
        begins = not (_has_begun(request) or request.params.beam_width)
        return begins and not self._decodes(scheduler)

    def _decodes(self, scheduler: Scheduler) -> bool:
        return self.role_of(scheduler) != "prefill"

    def _able(self, holder: Scheduler, request: Request) -> tuple[Scheduler, ...]:
        return tuple(each for each in self.schedulers if self._may_take(each, holder, request))

    def _able_to_decode(self, holder: Scheduler, request: Request) -> tuple[Scheduler, ...]:
        return tuple(each for each in self._able(holder, request) if self._decodes(each))

    def _move(self, request: Request, holder: Scheduler, able: tuple[Scheduler, ...]) -> None:
        """Move a movable request from ``holder`` to one of those that may take it."""
        adapter = holder.adapters.held(request.adapter)
        moving = holder.take_out(request)  # which counts what was cached where it was placed
        among = _attached(self._suited(request, able))
        request.scheduler = other = self._router.place(request, among)
        request.hands_over |= self._hands_over(other, request)
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
        scheduler.feeds.on_prefilled = functools.partial(self.hand_over, scheduler)
        scheduler.feeds.on_chunk = functools.partial(self.send_ahead, scheduler)
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
            self._roles.pop(scheduler, None)
            self._router.remove(scheduler)


def _attached(schedulers: Seq[Scheduler]) -> list[Scheduler]:
    """Return those with a worker; all if none has one."""
    return [each for each in schedulers if each.attached] or list(schedulers)


def _has_begun(request: Request) -> bool:
    return any(each.output_ids for each in request.sequences)
