"""The worker's memory: slots, pages and cached prefixes of sequences.

Only here do :mod:`~trioserve.scheduler.slots`, :mod:`~trioserve.scheduler.token_counts`,
:mod:`~trioserve.scheduler.page_pool` and :mod:`~trioserve.scheduler.prefix_cache` meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.requests.request import Sequence
from trioserve.requests.retention import Retention
from trioserve.scheduler import policy
from trioserve.scheduler.disk_pages import DiskIndex, DiskPages
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.fetched_pages import FetchedPages, PageSource
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.page_lending import Lending
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Namespace, Node, PrefixMatch
from trioserve.scheduler.sequence_group import first_logprob, missing_rows
from trioserve.scheduler.sequence_state import NO_LOGPROBS, Running, SequenceState
from trioserve.scheduler.slots import SlotAllocator
from trioserve.scheduler.step_time import StepTimeModel
from trioserve.scheduler.token_counts import Ints, TokenCounts

_LOOKED_AT = 16
"""Pages of other prompts that are looked at, the newest first, for one to be copied."""


class Memory:
    """The memory of one worker, from its start or reset to its end or next reset."""

    def __init__(self, limits: SchedulerLimits, feeds: Feeds, disk_index: DiskIndex) -> None:
        self.limits = limits
        self._counters = feeds.counters
        self._now = 0.0
        # Without a prefix cache, pages on the host would never be matched.
        num_host_pages = limits.num_host_pages if limits.enable_prefix_caching else 0
        self.pool = PagePool(limits.num_pages, num_host_pages)
        self.prefix = PrefixCache(self.pool, limits.page_size, feeds.cache)
        has_disk = limits.has_disk and num_host_pages > 0
        self.disk = DiskPages(disk_index, self.prefix) if has_disk else None
        """Pages on disk; None if there are none."""
        sources: list[PageSource] = [disk_index] if has_disk else []
        if feeds.siblings is not None and num_host_pages:
            sources.append(feeds.siblings.pages_for(self.prefix))
        self.fetched = FetchedPages(self.prefix, sources) if sources else None
        """Fetching of pages from elsewhere; None if there are no sources."""
        self.lending = Lending(self.prefix)
        """Pages that are lent to other workers."""
        if feeds.indexed is not None:
            self.prefix.join(feeds.indexed)
        self.slots = SlotAllocator(limits.max_num_seqs)
        self.counts = TokenCounts(
            limits.max_num_seqs, limits.vocab_size, one_row_in_flight=limits.num_stages > 1
        )
        self._cuts: dict[int, int] = {}
        """Pages that the block table of a slot keeps, once the next plan has cut it."""

    def match(self, seq_state: SequenceState, plan: int) -> PrefixMatch:
        """Return the cached pages that the sequence could begin with in plan ``plan``.

        The prefix ends early enough for the tokens that must be computed: the one before the first
        log-probability still to come, that of the first row of output tensors, or all tokens if the
        prompt's mean is wanted.
        """
        if seq_state.namespace is None or seq_state.sequence.sampler.pooling == "mean":
            return PrefixMatch()
        most = _most_cached(seq_state.sequence)
        return self.prefix.match(seq_state.namespace, seq_state.known_column(), plan, most)

    def waits_for_pages(
        self, seq_state: SequenceState, match: PrefixMatch, step_times: StepTimeModel
    ) -> bool:
        """Return True if the sequence waits for pages from elsewhere that come after ``match``."""
        if self.fetched is None or seq_state.sequence.sampler.pooling == "mean":
            return False
        most = _most_cached(seq_state.sequence)
        return self.fetched.waits(seq_state, match, most, step_times)

    def fits(self, seq_state: SequenceState, match: PrefixMatch, running: Ints) -> bool:
        """Return True if the capacity policy admits the sequence, with pages for all its tokens.

        An idle page that it shares can't be evicted any more, and a page on the host needs a page
        on the device. So both count as needed. ``running`` are the slots of the running sequences.
        """
        total = self.limits.pages_for(seq_state.sequence.num_tokens)
        return policy.may_admit(
            self.limits.capacity_policy,
            available=self.num_available,
            retiring=self.pool.num_retiring,
            need=total - len(match.pages) + self.pool.count_idle(match.pages),
            growth=self.limits.pages_for(seq_state.limit) - total,
            running_growth=self._growth(running),
        )

    def match_fork(self, child: SequenceState, parent: SequenceState, plan: int) -> PrefixMatch:
        """Publish the full pages of ``parent``; return those that ``child`` can begin with.

        The tokens of the child are those of the parent's pages, and one more.
        """
        child.namespace = parent.namespace
        self._publish(parent, parent.computed, 0)
        return self.match(child, plan)

    def enter(
        self,
        seq_state: SequenceState,
        match: PrefixMatch,
        copied_from: SequenceState | None = None,
    ) -> None:
        """Give the sequence, which must fit, a slot and pages for all its known tokens.

        A fork shares the matched pages, and gets copies of the other pages of ``copied_from``.
        """
        shared, on_host = match.pages, match.on_host
        self.pool.share(shared)
        self.prefix.pin(on_host)
        missing = self.limits.pages_for(seq_state.sequence.num_tokens) - len(shared)
        enough = self._make_free(missing)
        assert enough, "a sequence was let in without pages for it"
        loaded = self.prefix.load(on_host)
        self._counters.pages_onloaded += len(loaded)
        seq_state.pages = shared + loaded + self.pool.allocate(missing - len(loaded))
        seq_state.cursor = match.nodes[-1] if match.nodes else None
        slot, generation = self.slots.open()
        if copied_from is None:
            seq_state.cached = self._copy_begun_page(seq_state, match)
        else:
            seq_state.cached = copied_from.computed
            for place in range(len(match.nodes), self.limits.pages_for(seq_state.cached)):
                self.prefix.copies.append((copied_from.pages[place], seq_state.pages[place]))
        computed = max(seq_state.cached, seq_state.sequence.request.num_prefix_tokens)
        seq_state.enter_slot(self.counts, slot, generation, computed)
        self.counts.room[slot] = len(seq_state.pages) * self.limits.page_size
        seq_state.prompt_logprobs_from = first_logprob(seq_state.sequence)
        seq_state.missing_rows = missing_rows(seq_state.sequence)

    def _copy_begun_page(self, seq_state: SequenceState, match: PrefixMatch) -> int:
        """Copy the page in which the virtual tokens of its adapter end, if all before are matched.

        It is another prompt's page, which begins with the same tokens. A page that plans in flight
        compute is no such: its sequence may still be aborted.

        Returns:
            The number of tokens that needn't be computed.
        """
        start, request = len(match.nodes) * self.limits.page_size, seq_state.sequence.request
        stop = request.num_virtual_tokens
        is_within = start < stop < start + self.limits.page_size
        if not is_within or seq_state.namespace is None or _most_cached(seq_state.sequence) < stop:
            return start
        begun = request.cache_column()[TOKEN_BYTES * start : TOKEN_BYTES * stop]
        parent = seq_state.cursor or self.prefix.find_root(seq_state.namespace)
        for node in () if parent is None else itertools.islice(parent.newest(), _LOOKED_AT):
            is_there = node.plan <= self.pool.acknowledged and not self.pool.is_on_host(node.page)
            if is_there and node.tokens.startswith(begun):
                self.prefix.copies.append((node.page, seq_state.pages[len(match.nodes)]))
                return stop
        return start

    def change_slot(self, seq_state: SequenceState) -> None:
        """Move the sequence, which no plan in flight names, to a slot that is opened anew."""
        self._cuts.pop(seq_state.slot, None)
        self.slots.close(seq_state.slot, seq_state.last_plan)
        seq_state.change_slot(self.counts, *self.slots.open())

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated at once, evicting idle ones."""
        return self.pool.num_free + self.pool.num_idle

    def has_page_for_next(self, seq_state: SequenceState) -> bool:
        """Return True if the block table reaches past the planned tokens."""
        return seq_state.planned < len(seq_state.pages) * self.limits.page_size

    def append_page(self, seq_state: SequenceState) -> int | None:
        """Append a page to the block table and return it; None if there is none now."""
        if not self._make_free(1):
            return None
        seq_state.pages += self.pool.allocate(1)
        self.counts.room[seq_state.slot] += self.limits.page_size
        return seq_state.pages[-1]

    def take_back_spare(self, running: Running, plan: int) -> bool:
        """Take the pages that refused drafts have left behind the tokens; False if there are none.

        Plan ``plan``, which is being built, cuts the block tables. Pages that a plan in flight may
        write drafts to are kept.
        """
        counts, slots, size = self.counts, running.slots, self.limits.page_size
        wanted = -(-counts.length[slots] // size)
        places = ((counts.room[slots] // size > wanted) & ~counts.unsettled[slots]).nonzero()[0]
        for seq_state, num_pages in zip(running.at(places), wanted[places].tolist(), strict=True):
            spare = seq_state.pages[num_pages:]
            del seq_state.pages[num_pages:]
            self.pool.release(spare, min(seq_state.last_plan, plan - 1))
            counts.room[seq_state.slot] = num_pages * size
            self._cuts[seq_state.slot] = num_pages
        return len(places) > 0

    def take_copies(self, plan: int) -> list[tuple[int, int]]:
        """Return and clear the copies of pages that ``plan`` begins with."""
        if self.disk is not None:
            self.disk.note_plan(plan)
        copies = self.prefix.take_copies()
        self.lending.note_copies(plan, copies)
        return copies

    def take_cuts(self) -> list[tuple[int, int]]:
        """Return and clear the slots whose block tables a plan cuts, and the pages they keep."""
        cuts, self._cuts = list(self._cuts.items()), {}
        return cuts

    def publish(self, seq_state: SequenceState, plan: int) -> None:
        """Let plans after ``plan`` match the pages that are full once ``plan`` is done."""
        self._publish(seq_state, seq_state.planned, plan)

    def _publish(self, seq_state: SequenceState, num_tokens: int, plan: int) -> None:
        """Publish the full pages of the first ``num_tokens``, which ``plan`` completes."""
        if seq_state.namespace is not None:
            seq_state.cursor = self.prefix.publish(
                seq_state.namespace,
                seq_state.cursor,
                seq_state.known_tokens(),
                seq_state.pages,
                num_tokens // self.limits.page_size,
                plan,
            )

    def leave(self, seq_state: SequenceState) -> None:
        """Take slot and pages back. Full pages, also of the output, stay in the prefix cache."""
        pages = seq_state.pages
        if seq_state.namespace is not None:
            tokens = seq_state.known_tokens()
            num_full = seq_state.computed // self.limits.page_size
            pages = self.prefix.leave(
                seq_state.namespace, seq_state.cursor, tokens, pages, num_full
            )
            retention = seq_state.sequence.request.retention
            # Flushed pages are never matched, so they keep no priority.
            if retention is not None and seq_state.namespace == seq_state.own_namespace:
                path = self.prefix.path(seq_state.namespace, tokens, num_full)
                prompt_length = len(seq_state.sequence.request.prompt_ids)
                self._retain(retention, path, prompt_length)
        self.pool.release(pages, seq_state.last_plan)
        self._cuts.pop(seq_state.slot, None)
        self.slots.close(seq_state.slot, seq_state.last_plan)
        seq_state.leave_slot()

    def _retain(self, retention: Retention, path: list[Node], prompt_length: int) -> None:
        """Set the priorities that a request gives to the pages of ``path``, the deepest first."""
        wanted = retention.of_pages(self.limits.page_size, prompt_length, len(path))
        for node, worth in zip(reversed(path), reversed(wanted), strict=True):
            if worth is not None:
                priority, duration = worth
                self.prefix.priorities.set_own(node, priority, self._now + duration)

    def advance(self, now: float) -> None:
        """Set the time to ``now``, and reset the priorities that have expired."""
        self._now = now
        if self.prefix.priorities.next_expiry <= now:
            self.prefix.priorities.expire(now)

    def pin(self, name: str, namespace: Namespace, tokens: Seq[int], priority: int) -> None:
        """Pin the cached pages of ``tokens`` under that name, until :meth:`unpin`."""
        path = self.prefix.path(namespace, tokens, len(tokens) // self.limits.page_size)
        if path:
            self.prefix.priorities.pin(name, path[-1], priority)
        else:
            self.prefix.priorities.unpin(name)

    def unpin(self, name: str) -> None:
        """Remove the pin of that name, if there is one."""
        self.prefix.priorities.unpin(name)

    def flush(self, running: Iterable[SequenceState], *, for_other_weights: bool = False) -> int:
        """Clear the prefix cache; running sequences keep their pages.

        Pages on disk are deleted, unless the worker has other weights now, with other files.

        Returns:
            The number of freed pages.
        """
        freed = self.prefix.flush()
        if self.disk is not None:
            self.disk.index.empty("list_pages" if for_other_weights else "delete_pages")
        for seq_state in running:
            if seq_state.namespace is not None:
                seq_state.namespace = self.prefix.flushed(seq_state.namespace)
        return freed

    def retract(self, seq_state: SequenceState, plan: int) -> bool:
        """Unpublish what plans after ``plan`` compute for the sequence; False if others use it."""
        is_unpublished, seq_state.cursor = self.prefix.retract(seq_state.cursor, plan)
        return is_unpublished

    def acknowledge(self, plan: int) -> None:
        """Note that plan ``plan`` is done, so that what only it and earlier ones named is free."""
        self.pool.acknowledge(plan)
        self.lending.acknowledge(plan)
        if self.disk is not None:
            self.disk.acknowledge(plan)
        self.slots.acknowledge(plan)

    def _growth(self, slots: Ints) -> Ints:
        """Return the pages that each of ``slots`` may still need before it ends by length."""
        size = self.limits.page_size
        return -(-self.counts.limit[slots] // size) - self.counts.room[slots] // size

    def _make_free(self, count: int) -> bool:
        """Free ``count`` pages, evicting idle ones; return False if there aren't enough."""
        missing = count - self.pool.num_free
        if missing > self.pool.num_idle:
            return False
        if missing > 0:
            num_offloaded, num_lost = self.prefix.evict(missing)
            self._counters.pages_offloaded += num_offloaded
            self._counters.pages_evicted += num_lost
        return True


def _most_cached(sequence: Sequence) -> int:
    """Return the number of tokens that needn't be computed at most."""
    most, first_row = sequence.num_tokens - 1, missing_rows(sequence).first
    if first_row is not None:
        most = min(most, first_row)
    first = first_logprob(sequence)
    return most if first == NO_LOGPROBS else min(most, first - 1)
