"""The router: places each request on one of the schedulers, from what they hold at that moment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

import attrs

from trioserve.engine.routing.policy import Policy, WorkerLoad
from trioserve.requests.request import Request, State
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.prefix_tree import Namespace
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.sequence_state import namespace_of

_BEFORE_DECODE = (State.CREATED, State.TOKENIZING, State.WAITING, State.PREFILL)
MAX_COMING = 256
"""Prompts of a worker, not computed yet, whose prefixes are looked for."""


@attrs.define
class _Running:
    """The running sequences of a worker after one of its plans."""

    plan: int = -1
    num_decodes: int = 0
    context: int = 0
    prefill_tokens: int = 0
    num_prefills: int = 0


@attrs.define(eq=False)
class _Worker:
    """A worker, as the router knows it."""

    scheduler: Scheduler
    coming: OrderedDict[Request, None] = attrs.field(factory=OrderedDict)
    """Requests placed on it whose prompts it may still have to compute, the newest last."""
    running: _Running = attrs.field(factory=_Running)


@attrs.define(eq=False)
class Router:
    """The choice of a scheduler for each request.

    Args:
        policy: The choice among their loads.
    """

    _policy: Policy
    _workers: dict[Scheduler, _Worker] = attrs.field(init=False, factory=dict)

    def place(self, request: Request, among: Seq[Scheduler]) -> Scheduler:
        """Return one of the schedulers ``among`` for a tokenized request, and note that it is."""
        for gone in self._workers.keys() - set(among):
            if not gone.attached:
                del self._workers[gone]
        workers = [self._workers.setdefault(each, _Worker(each)) for each in among]
        if len(workers) == 1:
            request.num_cached_when_placed = 0
            return workers[0].scheduler
        loads = [_load_of(each, request) for each in workers]
        index = self._policy.choose(loads, len(request.prompt_ids))
        request.num_cached_when_placed = loads[index].num_cached
        coming = workers[index].coming
        coming[request] = None
        if len(coming) > MAX_COMING:
            coming.popitem(last=False)
        return workers[index].scheduler


def _load_of(worker: _Worker, request: Request) -> WorkerLoad:
    """Return the load of a worker that has been attached, as it matters for ``request``."""
    core = worker.scheduler.core
    assert core is not None
    state = _running_of(worker, core)
    cached = on_host = 0
    if core.limits.enable_prefix_caching:
        namespace = namespace_of(request.cache_salt, request.adapter)
        match = core.memory.prefix.match(namespace, request.prompt_ids, core.next_number)
        size = core.limits.page_size
        on_host = match.num_on_host * size
        cached = len(match.nodes) * size - on_host
        coming = _coming(worker, request, namespace, size)
        if coming > cached + on_host:
            cached, on_host = coming, 0
    free = core.memory.slots.num_free - core.num_waiting
    return WorkerLoad(
        model=core.step_times,
        cached=cached,
        cached_on_host=on_host,
        prompt_tokens=core.num_waiting_tokens - core.num_waiting_cached + state.prefill_tokens,
        num_prompts=core.num_waiting + state.num_prefills,
        num_decodes=state.num_decodes,
        context=state.context,
        num_ahead=max(1 - free, 0),
        max_tokens=core.limits.max_num_batched_tokens,
        itl_target=core.limits.itl_target,
    )


def _running_of(worker: _Worker, core: SchedulerCore) -> _Running:
    """Return the running sequences after the last plan; they are counted once a plan."""
    if worker.running.plan != core.next_number:
        counts, slots = core.memory.counts, core.running.slots
        decodes = counts.decodes[slots]
        lengths = counts.length[slots]
        missing = lengths - counts.planned[slots]
        worker.running = _Running(
            core.next_number,
            num_decodes=int(decodes.sum()),
            context=int(lengths[decodes].sum()),
            prefill_tokens=int(missing[~decodes].sum()),
            num_prefills=int((~decodes).sum()),
        )
    return worker.running


def _coming(worker: _Worker, request: Request, namespace: Namespace, page_size: int) -> int:
    """Return the tokens of the longest prefix that another prompt placed there will bring."""
    longest = 0
    tokens = request.prompt_ids
    for other in [each for each in worker.coming if not _is_coming(each)]:
        del worker.coming[other]
    for other in worker.coming:
        known = other.prompt_ids
        if known[: longest + page_size] != tokens[: longest + page_size]:
            continue
        if namespace_of(other.cache_salt, other.adapter) == namespace:
            longest = max(longest, _common(known, tokens, page_size))
    return min(longest, (len(tokens) - 1) // page_size * page_size)


def _is_coming(request: Request) -> bool:
    """Return True if the prompt of ``request`` may still have to be computed."""
    return request.sequences[0].state in _BEFORE_DECODE


def _common(one: Seq[int], other: Seq[int], page_size: int) -> int:
    """Return the number of tokens in whole pages that both begin with."""
    most = min(len(one), len(other)) // page_size
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * page_size] == other[: middle * page_size]:
            low = middle
        else:
            high = middle - 1
    return low * page_size
