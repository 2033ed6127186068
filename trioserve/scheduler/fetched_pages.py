"""Pages of the prefix cache that come from elsewhere: from the disk, or from a sibling's cache.

If a request could begin with pages that its worker lacks and a *source* has, they are fetched to
the host's memory, in a *transfer* beside the steps, and the request finds them there. It waits
meanwhile, and others overtake it. It waits at most once before it enters, and only if to compute
the pages would take longer. Pages of a prompt that a worker computes for another one are fetched
*ahead*, while the rest of the prompt is computed.

The decisions are made here, without a task; :mod:`~trioserve.scheduler.page_transfers` has the
tasks. The sources are :mod:`~trioserve.scheduler.disk_pages` and
:mod:`~trioserve.scheduler.siblings`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.page_keys import keys_after
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Namespace, Node, PrefixMatch
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.step_time import StepTimeModel

_SMOOTHING = 0.1
"""Part of the earlier transfers' weight that a transfer takes."""
_LEAST_VARIANCE = 1.0
"""Variance of the numbers of pages from which on the time of a page is told from the rest."""
_FORGETTING = 0.02
"""Part of that time that is forgotten each time that it is too long, so that it is tried again."""
NO_PLAN = -1
"""Number of no plan, for :meth:`.PrefixCache.match`: pages of plans in flight are found, too."""


@attrs.define(eq=False)
class FetchPace:
    """The times of transfers from a source: a part of each, and a part for each page.

    It is the line of least squares through the transfers, of which the latest count most. As long
    as all have about the same number of pages, others are taken to be as quick.
    """

    _weight: float = attrs.field(init=False, default=0.0)
    _pages: float = attrs.field(init=False, default=0.0)
    _squares: float = attrs.field(init=False, default=0.0)
    _seconds: float = attrs.field(init=False, default=0.0)
    _products: float = attrs.field(init=False, default=0.0)
    """Weighted sums over the transfers."""

    def learn(self, num_pages: int, seconds: float) -> None:
        """Learn from a transfer of ``num_pages``."""
        left = 1 - _SMOOTHING
        self._weight = left * self._weight + 1
        self._pages = left * self._pages + num_pages
        self._squares = left * self._squares + num_pages * num_pages
        self._seconds = left * self._seconds + seconds
        self._products = left * self._products + num_pages * seconds

    def forget(self) -> None:
        """Forget a part of the times, which were too long."""
        self._seconds *= 1 - _FORGETTING
        self._products *= 1 - _FORGETTING

    def line(self) -> tuple[float, float]:
        """Return the seconds of a transfer without pages, and those of each page; 0 if unknown."""
        if not self._weight:
            return 0.0, 0.0
        pages, seconds = self._pages / self._weight, self._seconds / self._weight
        variance = self._squares / self._weight - pages * pages
        if variance < _LEAST_VARIANCE:
            return seconds, 0.0
        each = (self._products / self._weight - pages * seconds) / variance
        each = min(max(each, 0.0), seconds / pages)
        return max(seconds - each * pages, 0.0), each

    def seconds_of(self, num_pages: int) -> float:
        """Return the seconds that a transfer of ``num_pages`` takes; 0 if none was made."""
        fixed, each = self.line()
        return fixed + each * num_pages


@attrs.frozen(eq=False)
class Missing:
    """The pages that a sequence could begin with and its worker lacks, up to the last that counts.

    They are whole pages. ``namespace`` is that of the sequence; ``match`` are the pages before.
    """

    namespace: Namespace
    match: PrefixMatch
    column: bytes
    """Tokens of the sequence, as on the wire, up to those that must be computed."""
    page_size: int

    @property
    def parent(self) -> Node | None:
        """Node of the page before the first; None for none."""
        return self.match.nodes[-1] if self.match.nodes else None

    def pages(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield keys and tokens of the pages."""
        size = TOKEN_BYTES * self.page_size
        starts = range(size * len(self.match.nodes), len(self.column) - size + 1, size)
        return keys_after(
            self.namespace, self.parent, (self.column[at : at + size] for at in starts)
        )


@attrs.frozen(eq=False, kw_only=True)
class Found:
    """The first of the missing pages that a source has."""

    source: PageSource
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    """Tokens of each page, as on the wire."""
    loan: Loan | None = None
    """The pages as another worker's; None for those on disk."""


class Loan(Protocol):
    """Pages of another worker."""

    async def fetch(
        self, keys: Sequence[bytes], places: Sequence[int], call: WorkerCall, *, is_far: bool
    ) -> int:
        """Have them copied to ``places``: :meth:`trioserve.scheduler.siblings.PageLoan.fetch`."""
        ...


class PageSource(Protocol):
    """A source of pages."""

    @property
    def pace(self) -> FetchPace:
        """Times of its transfers."""
        ...

    def find(self, missing: Missing) -> Found | None:
        """Return the first of the pages that are there; None if the very first isn't."""
        ...

    def forget(self, key: bytes) -> None:
        """Note that the page of ``key``, which was found, isn't there."""
        ...


@attrs.frozen(eq=False, kw_only=True)
class _Wanted:
    seq_state: SequenceState | None
    missing: Missing
    found: Found
    num_flushes: int


@attrs.frozen(eq=False, kw_only=True)
class Fetch:
    """A transfer of pages to reserved places on the host, one below the other."""

    seq_state: SequenceState | None
    """Sequence that waits for them; None if they are fetched ahead."""
    found: Found
    namespace: Namespace
    parent: Node | None
    """Node of the page before the first; None for none."""
    num_flushes: int
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    places: Sequence[int]


@attrs.define(eq=False)
class FetchedPages:
    """The fetching of pages for one worker's prefix cache, from its start or reset to its end."""

    _prefix: PrefixCache
    _sources: Sequence[PageSource]
    _wanted: deque[_Wanted] = attrs.field(init=False, factory=deque)
    """Pages that sequences wait for and no transfer has begun to fetch."""
    _wanted_ahead: deque[_Wanted] = attrs.field(init=False, factory=deque)
    """Such pages that are to be fetched ahead."""
    _due: dict[bytes, list[tuple[Namespace, bytes, StepTimeModel]]] = attrs.field(
        init=False, factory=dict
    )
    """Arguments with which :meth:`fetch_ahead` is to be called again, by the key of a page that is
    fetched.
    """
    _waiting: set[SequenceState] = attrs.field(init=False, factory=set)
    """Sequences that wait for a transfer."""
    _fetching: set[bytes] = attrs.field(init=False, factory=set)
    """Keys of the pages that are wanted or fetched."""
    _num_transfers: int = attrs.field(init=False, default=0)
    """Transfers that have begun and not ended."""

    @property
    def is_busy(self) -> bool:
        """True if pages are wanted or fetched."""
        return bool(self._num_transfers or self._wanted or self._wanted_ahead)

    def wants(self, *, ahead: bool) -> bool:
        """Return True if :meth:`next_fetch` has something to fetch."""
        return bool(self._wanted_ahead if ahead else self._wanted)

    def waits(
        self, seq_state: SequenceState, match: PrefixMatch, stop: int, step_times: StepTimeModel
    ) -> bool:
        """Return True if the sequence waits for pages from elsewhere, and let it if that pays.

        Args:
            seq_state: A sequence that could enter a slot.
            match: Pages that it would begin with.
            stop: Most tokens that cached pages may give it.
            step_times: Model of the time to compute the pages.
        """
        if seq_state in self._waiting:
            return True
        namespace = seq_state.namespace
        if seq_state.asked_elsewhere or namespace is None:
            return False
        column = seq_state.known_column()[: TOKEN_BYTES * stop]
        missing = Missing(namespace, match, column, self._prefix.page_size)
        found = self._find(missing)
        key = self._first_fetched(found)
        if key is not None:  # They are fetched for another one or ahead: it finds them on the host.
            self._hurry(key, seq_state)
            return True
        seq_state.asked_elsewhere = True
        wanted = self._want(seq_state, missing, found, step_times)
        if wanted is None:
            return False
        self._wanted.append(wanted)
        self._waiting.add(seq_state)
        return True

    def fetch_ahead(self, namespace: Namespace, column: bytes, step_times: StepTimeModel) -> bool:
        """Have the pages fetched that other places have of a prompt so far, if that pays.

        Args:
            namespace: Namespace of the prompt.
            column: Tokens that are computed or in a plan, as on the wire.
            step_times: As in :meth:`waits`.

        Returns:
            True if there are such pages and none of them is fetched already. If one is, the rest
            is looked for after it.
        """
        most = len(column) // TOKEN_BYTES
        match = self._prefix.match(namespace, column, NO_PLAN, most)
        missing = Missing(namespace, match, column, self._prefix.page_size)
        found = self._find(missing)
        key = self._first_fetched(found)
        if key:
            self._due.setdefault(key, []).append((namespace, column, step_times))
            return False
        wanted = self._want(None, missing, found, step_times)
        if wanted is not None:
            self._wanted_ahead.append(wanted)
        return wanted is not None

    def _find(self, missing: Missing) -> list[Found]:
        """Return the pages that each source has, at least one each."""
        return [each for source in self._sources if (each := source.find(missing)) is not None]

    def _first_fetched(self, found: Sequence[Found]) -> bytes | None:
        """Return the key of the first page if it is fetched already, otherwise None."""
        keys = (each.keys[0] for each in found)
        return next((key for key in keys if key in self._fetching), None)

    def _hurry(self, key: bytes, seq_state: SequenceState) -> None:
        """Let the sequence wait for pages that are still to be fetched ahead."""
        for wanted in self._wanted_ahead:
            if key in wanted.found.keys:
                self._wanted_ahead.remove(wanted)
                self._wanted.append(attrs.evolve(wanted, seq_state=seq_state))
                self._waiting.add(seq_state)
                return

    def _want(
        self,
        seq_state: SequenceState | None,
        missing: Missing,
        found: Sequence[Found],
        step_times: StepTimeModel,
    ) -> _Wanted | None:
        """Note the pages with which a prompt is computed soonest; None to compute them all."""
        best = self._best(found, len(missing.match.nodes), step_times)
        if best is None:
            return None
        self._fetching.update(best.keys)
        return _Wanted(
            seq_state=seq_state,
            missing=missing,
            found=best,
            num_flushes=self._prefix.num_flushes,
        )

    def _best(
        self, found: Sequence[Found], num_cached: int, step_times: StepTimeModel
    ) -> Found | None:
        """Return the pages with which a prompt is computed soonest; None to compute them all."""
        size = self._prefix.page_size
        most = max((len(each.keys) for each in found), default=0)

        def seconds(each: Found) -> float:
            count = len(each.keys)
            fetching = each.source.pace.seconds_of(len(self._fetching) + count)
            return fetching + computing(count)

        def computing(num_fetched: int) -> float:
            start = num_cached + num_fetched
            return step_times.seconds_of((most - num_fetched) * size, start * size)

        best = min(found, key=seconds, default=None)
        if best is not None and step_times.is_known and seconds(best) > computing(0):
            best.source.pace.forget()
            return None
        return best

    def next_fetch(self, *, ahead: bool = False) -> Fetch | None:
        """Begin to fetch pages that a sequence waits for, or ``ahead``, as far as there is room.

        Return None if there are none.
        """
        queue = self._wanted_ahead if ahead else self._wanted
        while queue:
            wanted = queue.popleft()
            found, parent = wanted.found, wanted.missing.parent
            if parent is not None and self._prefix.has(parent):
                self._evict_last(parent)  # The pages go below it.
            places: list[int] = []
            while len(places) < len(found.keys) and self._make_room():
                places.append(self._prefix.pool.host.reserve())
            left = found.keys[len(places) :]
            self._fetching.difference_update(left)
            for key in left:
                self._due.pop(key, None)
            if places:
                self._num_transfers += 1
                return Fetch(
                    seq_state=wanted.seq_state,
                    found=found,
                    namespace=wanted.missing.namespace,
                    parent=parent,
                    num_flushes=wanted.num_flushes,
                    keys=found.keys[: len(places)],
                    tokens=found.tokens[: len(places)],
                    places=places,
                )
            self._end_waiting(wanted.seq_state)
        return None

    def _make_room(self) -> bool:
        """Free a place on the host if none is free; return False if that can't be done."""
        if not self._prefix.pool.host.num_free:
            self._prefix.free_host_place(DEFAULT_PRIORITY)
        return self._prefix.pool.host.num_free > 0

    def end(self, fetch: Fetch, num_fetched: int) -> None:
        """End a transfer of the first ``num_fetched`` pages; the source lacks the next."""
        host = self._prefix.pool.host
        self._num_transfers -= 1
        self._fetching.difference_update(fetch.keys)
        for key in fetch.keys[num_fetched : num_fetched + 1]:
            fetch.found.source.forget(key)
        has_parent = fetch.parent is None or self._prefix.has(fetch.parent)
        if not has_parent or fetch.num_flushes != self._prefix.num_flushes:
            num_fetched = 0
        node = None
        for tokens, place in list(zip(fetch.tokens, fetch.places, strict=True))[:num_fetched]:
            node = self._prefix.adopt(fetch.namespace, node or fetch.parent, tokens, place)
            if node.page == place:
                host.settle(place)
            else:
                host.cancel(place)  # It was computed meanwhile.
        for place in fetch.places[num_fetched:]:
            host.cancel(place)
        self._evict_last(node)
        self._end_waiting(fetch.seq_state)
        for key in fetch.keys:
            for arguments in self._due.pop(key, ()):
                self.fetch_ahead(*arguments)

    def _evict_last(self, node: Node | None) -> None:
        """Let the pages on the host on the path to ``node`` be evicted last, the deepest first."""
        pool = self._prefix.pool
        while node is not None and node.parent is not None:
            if pool.is_on_host(node.page):
                pool.host.move(node.page, pool.level(node.page))
            node = node.parent

    def _end_waiting(self, seq_state: SequenceState | None) -> None:
        if seq_state is not None:
            self._waiting.discard(seq_state)
            seq_state.expected_cached = None
