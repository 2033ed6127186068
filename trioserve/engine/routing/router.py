"""The router: places each request on one of the schedulers, from what they hold at that moment.

A decision doesn't go through the workers one by one. What they have of a prompt is in one index
(:mod:`~trioserve.scheduler.prefix_index`), and their loads are in columns. The load of a worker is
read again only after a change of its scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq

import attrs
import numpy as np

from trioserve.engine.routing.passed_over import PassedOver, hoped_for
from trioserve.engine.routing.policy import Bools, Floats, KnownPrefix, Loads, Policy
from trioserve.engine.routing.worker_load import worker_load
from trioserve.requests.request import Request, State
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.fetched_pages import FetchPace
from trioserve.scheduler.prefix_index import PrefixIndex, RunPath, WorkerPages
from trioserve.scheduler.prefix_tree import Namespace
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.sequence_state import namespace_of
from trioserve.scheduler.step_time import StepTimeModel


@attrs.define(eq=False)
class _Worker:
    """A worker as the router knows it."""

    scheduler: Scheduler
    core: SchedulerCore


@attrs.define(eq=False)
class Router:
    """The choice of a scheduler for each request.

    In the index, the pages and prompts of a worker have holder ``2 * number``, and its pages on the
    device the next one, if others can be on the host.

    Args:
        policy: The choice among their loads.
    """

    _policy: Policy
    _new: list[Scheduler] = attrs.field(init=False, factory=list)
    """Schedulers that aren't among the workers so far."""
    _workers: dict[int, _Worker] = attrs.field(init=False, factory=dict)
    """The workers by number, once there are several."""
    _numbers: dict[Scheduler, int] = attrs.field(init=False, factory=dict)
    _free_numbers: list[int] = attrs.field(init=False, factory=list)
    """Numbers of workers that were removed."""
    _absent: set[int] = attrs.field(init=False, factory=set)
    """Numbers without a worker process now."""
    _changed: set[int] = attrs.field(init=False, factory=set)
    """Workers whose loads have to be read again."""
    _loads: Loads = attrs.field(init=False, factory=Loads)
    _index: PrefixIndex = attrs.field(init=False, factory=PrefixIndex)
    _page_sizes: set[int] = attrs.field(init=False, factory=set)
    _passed_over: PassedOver[int] = attrs.field(init=False, factory=PassedOver)
    _with_host_pages: list[int] = attrs.field(init=False, factory=list)
    """Numbers of workers that may have pages on the host."""
    _siblings: list[int] = attrs.field(init=False, factory=list)
    """Numbers of workers that lend each other pages."""
    _pace: FetchPace = attrs.field(init=False, factory=FetchPace)
    """Times in which they fetch pages."""

    def add(self, scheduler: Scheduler) -> None:
        """Place requests on ``scheduler``, too."""
        self._new.append(scheduler)

    def remove(self, scheduler: Scheduler) -> None:
        """Place no more requests on ``scheduler``, and forget its pages."""
        if scheduler in self._new:
            self._new.remove(scheduler)
            return
        number = self._numbers.pop(scheduler)
        worker = self._workers.pop(number)
        worker.core.memory.prefix.leave_index()
        scheduler.feeds.indexed, scheduler.feeds.on_load_changed = None, None
        for numbers in (self._with_host_pages, self._siblings):
            if number in numbers:
                numbers.remove(number)
        self._changed.discard(number)
        self._absent.add(number)
        self._free_numbers.append(number)
        self._passed_over.forget(number)

    def place(
        self, request: Request, among: Seq[Scheduler] | None = None, *, may_split: bool = False
    ) -> Scheduler:
        """Return a scheduler for a tokenized request, and note that it gets it.

        The request is marked if another one is to compute its output.

        Args:
            request: The request.
            among: Schedulers that may be chosen, at least one. By default all may whose workers are
                there, or all if none is.
            may_split: True if prompt and output may be computed by two workers.
        """
        request.hands_over = False
        if request.coming is not None:  # It was placed on a worker that is lost, or removed.
            request.coming.end()
            request.coming = None
        every = (*self._numbers, *self._new)
        if len(every) > 1:
            self._update()
        asked_for = every if among is None else among
        if len(every) == 1 or not any(each in self._numbers for each in asked_for):
            request.num_cached_when_placed = 0
            return asked_for[0]
        namespace = namespace_of(request.cache_salt, request.adapter)
        prefix, paths = self._prefix_of(request, namespace)
        asked = (self._loads, len(request.prompt_ids), prefix, self._mask(among))
        apart = self._policy.choose_apart(*asked) if may_split else None
        request.hands_over = apart is not None
        number = self._policy.choose(*asked) if apart is None else apart
        request.num_cached_when_placed = int(prefix.num_cached()[number])
        worker = self._workers[number]
        self._note_placement(number, worker.core.step_times)
        limits = worker.core.limits
        if limits.enable_prefix_caching and request.sequences[0].state is not State.FINISHED:
            page_size = limits.page_size
            request.coming = self._index.add_coming(
                namespace, page_size, request.cache_column(), 2 * number, paths[page_size]
            )
        return worker.scheduler

    def foresee(self, request: Request, among: Seq[Scheduler]) -> Scheduler | None:
        """Return the scheduler that :meth:`place` will probably return; None if that is open."""
        if len(among) == 1:
            return among[0]
        self._update()
        if not all(each in self._numbers for each in among):
            return None
        prefix, _ = self._prefix_of(request, namespace_of(request.cache_salt, request.adapter))
        asked = (self._loads, len(request.prompt_ids), prefix, self._mask(among))
        number = self._policy.foresee(*asked)
        return None if number is None else self._workers[number].scheduler

    def _update(self) -> None:
        """Take in new schedulers, and what has changed."""
        for scheduler in [each for each in self._new if each.core is not None]:
            self._new.remove(scheduler)
            self._take_in(scheduler)
        while self._changed:
            number = self._changed.pop()
            worker = self._workers[number]
            self._loads[number] = worker_load(worker.core)
            self._loads.itl_target = worker.core.limits.itl_target
            self._page_sizes.add(worker.core.limits.page_size)
            if worker.scheduler.attached:
                self._absent.discard(number)
            else:
                self._absent.add(number)

    def _note_placement(self, number: int, times: StepTimeModel) -> None:
        """Note a placement on a worker whose steps take ``times``."""
        passed_over = self._passed_over.note(number, self._workers)
        for each in passed_over if times.is_known else ():
            self._loads.assume(each, worker_load(self._workers[each].core), hoped_for(times))

    def _take_in(self, scheduler: Scheduler) -> None:
        core = scheduler.core
        assert core is not None
        number = self._free_numbers.pop() if self._free_numbers else len(self._numbers)
        self._numbers[scheduler] = number
        self._workers[number] = _Worker(scheduler, core)
        self._changed.add(number)
        scheduler.feeds.on_load_changed = functools.partial(self._changed.add, number)
        if core.limits.enable_prefix_caching:
            on_device = None
            if core.memory.pool.num_host_pages:
                self._with_host_pages.append(number)
                on_device = 2 * number + 1
            if scheduler.feeds.siblings is not None:
                self._siblings.append(number)
                self._pace = scheduler.feeds.siblings.pace
            scheduler.feeds.indexed = WorkerPages(self._index, 2 * number, on_device)
            core.memory.prefix.join(scheduler.feeds.indexed)

    def _mask(self, among: Seq[Scheduler] | None) -> Bools | None:
        """Return a mask of the workers that may be chosen; None for all."""
        if among is not None:
            numbers = {self._numbers[each] for each in among if each in self._numbers}
        elif not self._absent:
            return None
        else:
            numbers = self._workers.keys() - self._absent
        mask = np.zeros(len(self._loads), dtype=np.bool_)
        mask[list(numbers or self._workers)] = True
        return mask

    def _prefix_of(
        self, request: Request, namespace: Namespace
    ) -> tuple[KnownPrefix, dict[int, RunPath]]:
        """Return what each worker has for the request, and its paths by the size of pages."""
        tokens = request.cache_column()
        found = np.zeros((2, 2 * len(self._loads)))
        paths = {
            page_size: self._index.find(namespace, page_size, tokens, *found)
            for page_size in self._page_sizes
        }
        held, coming = found[:, ::2]
        on_host = None
        if self._with_host_pages:
            on_host = np.zeros(len(self._loads))
            numbers = self._with_host_pages
            on_host[numbers] = (held - found[0, 1::2])[numbers]
            on_host[coming > held] = 0
        cached = np.maximum(held, coming)
        prefix = KnownPrefix(
            cached=cached if on_host is None else cached - on_host,
            on_host=on_host,
            loading=self._loading(request.worker_adapter) if request.worker_adapter else None,
        )
        if len(self._siblings) > 1:
            self._add_lent(prefix, held, cached, len(request.prompt_ids))
        return prefix, paths

    def _add_lent(self, prefix: KnownPrefix, held: Floats, cached: Floats, prompt: int) -> None:
        """Add the pages that workers could fetch from the sibling with most of them."""
        fixed, each = self._pace.line()
        of_token = each / min(self._page_sizes)
        siblings = self._siblings
        prefix.lent = np.zeros(len(self._loads))
        prefix.lent[siblings] = np.maximum(held[siblings].max() - cached[siblings], 0)
        prefix.fetching = fixed + of_token * prefix.lent
        prefix.handing_over = fixed + of_token * prompt

    def _loading(self, adapter: int) -> Floats:
        """Return the seconds for which an adapter has to be loaded on each worker."""
        seconds = np.zeros(len(self._loads))
        for number, worker in self._workers.items():
            residency = worker.core.residency
            if not residency.is_present(adapter):
                seconds[number] = residency.load_seconds
        return seconds
