"""Pages of the prefix cache on disk: which there are, and which are to be written and read.

The worker keeps each page in a file. It finds the file by the page's *key*: a hash of the prompt's
tokens from the start to the page's end, and of the salt. Numbers of this process are no part of it,
so files outlive the worker and the server. Pages of an adapter have no key: another adapter may
have its name tomorrow. What else a page's content depends on, such as the weights, the worker knows
(:mod:`gpu.loading.page_files`).

Pages go to the disk and come back through the host's memory, in *transfers* beside the steps:

- A page that has moved to the host is written to its file. Then it is evicted from the host without
  a loss.
- If a request could begin with pages that only the disk has, they are read to the host, where the
  request finds them. It waits meanwhile, and others overtake it. It waits at most once before it
  enters, and only if to compute the pages would take longer.

The decisions are made here, without a task; :mod:`~trioserve.scheduler.disk_transfers` has the
tasks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Namespace, Node, PrefixMatch
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.step_time import StepTimeModel

KEY_BYTES = 16
MOST_WRITTEN = 16
"""Pages that a transfer writes at most; they can't be evicted from the host meanwhile."""
_PART_WRITTEN = 4
"""A transfer writes at most one in so many places of the host."""
_SMOOTHING = 0.25
"""Weight of the latest transfer in the mean time to read a page."""
_FORGETTING = 0.02
"""Part of that time that is forgotten each time that it is too long, so that it is tried again."""


@attrs.define(eq=False)
class DiskIndex:
    """The keys of the pages on disk, and the time to read one; both outlive the pages in memory."""

    _folders: dict[str, set[bytes]] = attrs.field(factory=dict)
    """Keys by folder; workers of one host have one dict."""
    keys: set[bytes] = attrs.field(init=False, factory=set)
    """Keys of the pages in this worker's folder, which others may have, too."""
    due: Literal["", "delete_pages", "list_pages"] = attrs.field(init=False, default="")
    """Call that the worker is due after the cache was emptied; empty for none."""
    page_seconds: float = attrs.field(init=False, default=0.0)
    """Mean time to read a page; 0 if none was read."""

    def empty(self, due: Literal["delete_pages", "list_pages"]) -> None:
        """Forget all pages, and have their files deleted, or those of other weights listed."""
        if due == "list_pages":
            self.keys = set()  # those of the old folder are other workers' still
        else:
            self.keys.clear()
        self.due = due

    def use(self, folder: str, keys: Iterable[bytes]) -> None:
        """Take the pages that are in ``folder`` for those of this worker."""
        self.keys = self._folders.setdefault(folder, set())
        self.keys.clear()
        self.keys.update(keys)

    def learn(self, num_pages: int, seconds: float) -> None:
        """Learn from a transfer that read ``num_pages``."""
        each = seconds / num_pages
        old = self.page_seconds or each
        self.page_seconds = old + _SMOOTHING * (each - old)


@attrs.frozen(eq=False, kw_only=True)
class Write:
    """A transfer of pages from places on the host to the disk."""

    keys: Sequence[bytes]
    places: Sequence[int]
    num_flushes: int


@attrs.frozen(eq=False, kw_only=True)
class Read:
    """A transfer of pages from the disk to reserved places on the host, one below the other."""

    seq_state: SequenceState
    """Sequence that waits for them."""
    namespace: Namespace
    parent: Node | None
    """Node of the page before the first; None for none."""
    num_flushes: int
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    """Tokens of each page, as on the wire."""
    places: Sequence[int]


@attrs.define(eq=False)
class DiskPages:
    """The pages on disk of one worker's prefix cache, from its start or reset to its end."""

    index: DiskIndex
    _prefix: PrefixCache
    _offloaded: list[Node] = attrs.field(init=False, factory=list)
    """Pages that the next plan copies to the host."""
    _copying: dict[int, tuple[Node, int]] = attrs.field(init=False, factory=dict)
    """Pages that plans in flight copy to the host, with the plans' numbers, by place. If a plan
    fails, they may not be there.
    """
    _unwritten: OrderedDict[int, Node] = attrs.field(init=False, factory=OrderedDict)
    """Pages that are on the host and not on disk, by their places."""
    _wanted: deque[tuple[SequenceState, PrefixMatch, list[bytes], list[bytes]]] = attrs.field(
        init=False, factory=deque
    )
    """Sequences that wait for pages to be read: their match, and the pages' keys and tokens."""
    _waiting: set[SequenceState] = attrs.field(init=False, factory=set)
    """Sequences that wait for a transfer."""
    _reading: set[bytes] = attrs.field(init=False, factory=set)
    """Keys of the pages that are wanted or read."""

    def __attrs_post_init__(self) -> None:
        self._prefix.on_offloaded = self._offload

    @property
    def has_unwritten(self) -> bool:
        """True if pages have moved to the host and aren't on disk."""
        return bool(self._unwritten)

    @property
    def has_waiting(self) -> bool:
        """True if a sequence waits for pages to be read."""
        return bool(self._waiting)

    # ---- to the disk

    def _offload(self, node: Node) -> None:
        self._offloaded.append(node)

    def note_plan(self, number: int) -> None:
        """Note that plan ``number`` has the copies of all pages offloaded since the one before."""
        for node in self._offloaded:
            if self._is_at(node, node.page):
                self._copying[node.page] = node, number
        self._offloaded.clear()

    def acknowledge(self, number: int) -> None:
        """Note that plan ``number`` is done, so that what it copied can be written."""
        done = [place for place, (_, plan) in self._copying.items() if plan <= number]
        for place in done:
            node, _ = self._copying.pop(place)
            if self._is_at(node, place):
                self._unwritten[place] = node

    def next_write(self) -> Write | None:
        """Begin to write pages, those first that have been on the host longest; None if all are."""
        host = self._prefix.pool.host
        most = min(MOST_WRITTEN, max(host.num_places // _PART_WRITTEN, 1))
        keys: dict[bytes, int] = {}
        while self._unwritten and len(keys) < most:
            place, node = self._unwritten.popitem(last=False)
            key = self.key_of(node)
            if self._is_at(node, place) and key is not None and key not in self.index.keys:
                keys[key] = place
        for place in keys.values():
            host.lock(place)
        if not keys:
            return None
        places, num_flushes = list(keys.values()), self._prefix.num_flushes
        return Write(keys=list(keys), places=places, num_flushes=num_flushes)

    def end_write(self, write: Write, written: Sequence[bool], removed: Iterable[bytes]) -> None:
        """End a transfer: ``written`` says which pages are on disk now.

        ``removed`` are keys of pages that were deleted to make room for them.
        """
        for key, place, is_written in zip(write.keys, write.places, written, strict=True):
            self._prefix.pool.host.unlock(place)
            if is_written and write.num_flushes == self._prefix.num_flushes:
                self.index.keys.add(key)
        self.index.keys.difference_update(removed)

    # ---- from the disk

    def waits(
        self, seq_state: SequenceState, match: PrefixMatch, stop: int, step_times: StepTimeModel
    ) -> bool:
        """Return True if the sequence waits for pages from the disk, and let it if that pays.

        Args:
            seq_state: A sequence that could enter a slot.
            match: Pages that it would begin with.
            stop: Most tokens that cached pages may give it.
            step_times: Model of the time to compute the pages.
        """
        if seq_state in self._waiting:
            return True
        if seq_state.asked_disk or not self.index.keys:
            return False
        keys, tokens = self._missing(seq_state, match, stop)
        if keys and keys[0] in self._reading:
            return True  # Another one waits for it, and then this one finds it on the host.
        seq_state.asked_disk = True
        if not keys:
            return False
        size = self._prefix.page_size
        computing = step_times.seconds_of(len(keys) * size, len(match.nodes) * size)
        reading = self.index.page_seconds * (len(self._reading) + len(keys))
        if step_times.is_known and reading > computing:
            self.index.page_seconds *= 1 - _FORGETTING
            return False
        self._wanted.append((seq_state, match, keys, tokens))
        self._waiting.add(seq_state)
        self._reading.update(keys)
        return True

    def next_read(self) -> Read | None:
        """Begin to read the pages that a sequence waits for, as far as the host has room.

        Return None if there are none.
        """
        while self._wanted:
            seq_state, match, keys, tokens = self._wanted.popleft()
            pool = self._prefix.pool
            if match.nodes and self._prefix.has(match.nodes[-1]):
                self._evict_last(match.nodes[-1])  # The pages go below it.
            places: list[int] = []
            while len(places) < len(keys) and self._make_room():
                places.append(pool.host.reserve())
            self._reading.difference_update(keys[len(places) :])
            if places:
                return Read(
                    seq_state=seq_state,
                    namespace=_namespace_of(seq_state),
                    parent=match.nodes[-1] if match.nodes else None,
                    num_flushes=self._prefix.num_flushes,
                    keys=keys[: len(places)],
                    tokens=tokens[: len(places)],
                    places=places,
                )
            self._end_waiting(seq_state)
        return None

    def _make_room(self) -> bool:
        """Free a place on the host if none is free; return False if that can't be done."""
        if not self._prefix.pool.host.num_free:
            self._prefix.free_host_place(DEFAULT_PRIORITY)
        return self._prefix.pool.host.num_free > 0

    def end_read(self, read: Read, num_read: int) -> None:
        """End a transfer that has read the first ``num_read`` pages; the next isn't on disk."""
        host = self._prefix.pool.host
        self._reading.difference_update(read.keys)
        self.index.keys.difference_update(read.keys[num_read : num_read + 1])
        has_parent = read.parent is None or self._prefix.has(read.parent)
        if not has_parent or read.num_flushes != self._prefix.num_flushes:
            num_read = 0
        node = None
        for tokens, place in list(zip(read.tokens, read.places, strict=True))[:num_read]:
            node = self._prefix.adopt(read.namespace, node or read.parent, tokens, place)
            if node.page == place:
                host.settle(place)
            else:
                host.cancel(place)  # It was computed meanwhile.
        for place in read.places[num_read:]:
            host.cancel(place)
        self._evict_last(node)
        self._end_waiting(read.seq_state)

    def _evict_last(self, node: Node | None) -> None:
        """Let the pages on the host on the path to ``node`` be evicted last, the deepest first."""
        pool = self._prefix.pool
        while node is not None and node.parent is not None:
            if pool.is_on_host(node.page):
                pool.host.move(node.page, pool.level(node.page))
            node = node.parent

    def _end_waiting(self, seq_state: SequenceState) -> None:
        self._waiting.discard(seq_state)
        seq_state.expected_cached = None

    def _is_at(self, node: Node, place: int) -> bool:
        """Return True if ``node`` is in the tree, with its content in ``place`` on the host."""
        is_on_host = self._prefix.pool.is_on_host(place)
        return is_on_host and node.page == place and self._prefix.has(node)

    # ---- keys

    def _missing(
        self, seq_state: SequenceState, match: PrefixMatch, stop: int
    ) -> tuple[list[bytes], list[bytes]]:
        """Return keys and tokens of the pages on disk that come next after ``match``."""
        keys: list[bytes] = []
        tokens: list[bytes] = []
        namespace = seq_state.namespace
        if namespace is None or not _is_lasting(namespace):
            return keys, tokens
        key = self.key_of(match.nodes[-1]) if match.nodes else _root_key(namespace)
        assert key is not None
        column, size = seq_state.known_column(), TOKEN_BYTES * self._prefix.page_size
        for start in range(size * len(match.nodes), TOKEN_BYTES * stop - size + 1, size):
            piece = column[start : start + size]
            key = _page_key(key, piece)
            if key not in self.index.keys:
                break
            keys.append(key)
            tokens.append(piece)
        return keys, tokens

    def key_of(self, node: Node) -> bytes | None:
        """Return the key of ``node``; None if it isn't to be on disk."""
        unknown: list[Node] = []
        known: bytes | None = None
        while node.parent is not None:
            if known is None:
                known = node.disk_key
                if known is None:
                    unknown.append(node)
            node = node.parent
        if not _is_lasting(node.namespace):
            return None
        key = known or _root_key(node.namespace)
        for each in reversed(unknown):
            key = each.disk_key = _page_key(key, each.tokens)
        return key


def _namespace_of(seq_state: SequenceState) -> Namespace:
    assert seq_state.namespace is not None
    return seq_state.namespace


def _is_lasting(namespace: Namespace) -> bool:
    """Return True if a namespace is that of a salt alone."""
    return len(namespace) == 1


def _root_key(namespace: Namespace) -> bytes:
    return _hash(str(namespace[0]).encode())


def _page_key(parent: bytes, tokens: bytes) -> bytes:
    return _hash(parent + tokens)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
