"""The radix prefix cache: it finds pages that already hold the KV of a prompt's beginning.

In the tree every node is one full page. The edge to a node is the page's tokens, as on the wire, so
the path to it spells all tokens that its KV depends on. Each *namespace* has its own root. A
namespace is all else that the KV depends on, together with the caller's salt.

Rules, and what follows from them:

1. A node is **published** by the plan that computes its page, and **matched** only by later plans.
   The worker runs plans in order, and a failed plan empties the whole cache, so a matched page has
   been computed when it is read.
2. A running sequence publishes only below nodes that it holds itself. It stops at the first page
   that another sequence has published before it; its own copy of that page stays private.
3. When a sequence leaves, the rest of its full pages is published too, if necessary below such
   foreign nodes. The sequence first becomes a holder of those nodes and then releases the whole
   path, deepest page first.
4. So a holder of a node's page holds the pages of its ancestors as long or longer. Below an idle
   page there are only idle pages. They have been idle at least as long and are worth no more
   (:mod:`~trioserve.scheduler.page_priorities`). Among the pages of the lowest level, the page that
   has been idle longest therefore never has a page below it. Eviction just takes that page, and all
   idle pages can be evicted.
5. If the host has memory for it, an evicted page moves there: its node stays, with the number of a
   place on the host (:mod:`~trioserve.scheduler.host_pages`). Below such a node there are only such
   nodes, and rule 4 holds for them like for idle pages. A sequence that matches them gets them
   copied back onto pages of its own. :attr:`PrefixCache.copies` keeps the order of evictions and
   loads, so that places and pages can be used again at once. The copies are done before anything
   else in the plan being built, or in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from trioserve.protocol.wire import TOKEN_BYTES, from_ints
from trioserve.scheduler.cache_events import CacheEvents
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.page_priorities import Priorities
from trioserve.scheduler.prefix_index import WorkerPages
from trioserve.scheduler.prefix_tree import FLUSHED, NO_PAGE, Namespace, Node, PrefixMatch


@attrs.define(eq=False, repr=False)
class PrefixCache:
    """The tree over the pages of ``pool``; a page holds ``page_size`` tokens."""

    pool: PagePool
    page_size: int
    events: CacheEvents = attrs.field(factory=CacheEvents)
    """Events of pages that enter, move or leave."""
    priorities: Priorities = attrs.field(init=False)
    """Levels of the pages, by which they are evicted."""
    copies: list[tuple[int, int]] = attrs.field(init=False, factory=list)
    """Copies of pages to be done, in order: (source, destination)."""
    on_offloaded: Callable[[Node], None] = attrs.field(init=False, default=lambda node: None)
    """Called with each page that moves to the host, once its copy is among ``copies``."""
    _indexed: WorkerPages | None = attrs.field(init=False, default=None)
    """Record of the pages in the index over all workers, if there are several."""
    _roots: dict[Namespace, Node] = attrs.field(init=False, factory=dict)
    _node_of: dict[int, Node] = attrs.field(init=False, factory=dict)
    num_flushes: int = attrs.field(init=False, default=0)
    """Number of times that the cache was cleared."""

    def __attrs_post_init__(self) -> None:
        self.priorities = Priorities(self.pool)

    def roots(self) -> Iterator[Node]:
        """Yield the root of each namespace that has pages, the newest first."""
        return reversed(self._roots.values())

    def find_root(self, namespace: Namespace) -> Node | None:
        """Return the root of ``namespace``; None if it has no pages."""
        return self._roots.get(namespace)

    @property
    def num_nodes(self) -> int:
        """Number of pages in the tree, including those on the host."""
        return len(self._node_of)

    def join(self, indexed: WorkerPages) -> None:
        """Report all pages, now and from now on, to the index over all workers."""
        self._indexed = indexed
        nodes = list(self._roots.values())
        for node in nodes:
            nodes.extend(node.children.values())
            if node.parent is not None:
                indexed.on_added(node, on_host=self.pool.is_on_host(node.page))

    def leave_index(self) -> None:
        """Remove all pages from the index, if this cache has joined one."""
        if self._indexed is not None:
            self._indexed.forget(self._node_of.values())
            self._indexed = None

    def nodes(self) -> list[Node]:
        """Return all pages of the tree, in no order."""
        return list(self._node_of.values())

    def has(self, node: Node) -> bool:
        """Return whether ``node`` is still in the tree."""
        return self._node_of.get(node.page) is node

    def match(
        self, namespace: Namespace, tokens: bytes, plan: int, most: int | None = None
    ) -> PrefixMatch:
        """Return the longest cached prefix of ``tokens`` that plan ``plan`` may use.

        The tokens are a column as on the wire. The prefix has at most ``most`` of them, by default
        any number but all, because the last token has to be computed for its logits.
        """
        node = self.find_root(namespace)
        if node is None:
            return PrefixMatch()
        path: list[Node] = []
        num_on_host = 0
        size = TOKEN_BYTES * self.page_size
        stop = len(tokens) - TOKEN_BYTES if most is None else TOKEN_BYTES * most
        for start in range(0, stop - size + 1, size):
            node = node.children.get(tokens[start : start + size])
            if node is None:
                break
            if node.plan == plan:
                return PrefixMatch(tuple(path), num_on_host, pending=True)
            path.append(node)
            num_on_host += self.pool.is_on_host(node.page)
        return PrefixMatch(tuple(path), num_on_host)

    def publish(
        self,
        namespace: Namespace,
        cursor: Node | None,
        tokens: Sequence[int],
        pages: Sequence[int],
        stop: int,
        plan: int,
    ) -> Node | None:
        """Publish the pages before page ``stop`` of a running sequence (rule 2).

        Args:
            namespace: Namespace of the sequence.
            cursor: Deepest node on the path that the sequence holds; None for the root.
            tokens: Tokens of the sequence, at least ``stop`` pages of them.
            pages: Its block table.
            stop: Number of its first pages that are full once ``plan`` is done.
            plan: Number of the plan being built.

        Returns:
            The new cursor.
        """
        for index in range(cursor.depth if cursor else 0, stop):
            parent = cursor or self._root(namespace)
            key = self._key(tokens, index)
            if key in parent.children:
                break
            cursor = self._add(parent, key, pages[index], plan)
        return cursor

    def retract(self, cursor: Node | None, plan: int) -> tuple[bool, Node | None]:
        """Unpublish what plans after ``plan`` compute for one sequence, unless others use it.

        Args:
            cursor: Deepest node on the path that the sequence holds.
            plan: Oldest plan in flight.

        Returns:
            True if it was unpublished, and the new cursor. Otherwise nothing has changed.
        """
        retracted: list[Node] = []
        node = cursor
        while node is not None and node.plan > plan:
            # A child outside the path was computed after pages of this one. A sequence that has
            # left may still have a row in flight that reads it.
            if (
                self.pool.holders(node.page) > 1
                or self.pool.epoch(node.page) > plan
                or len(node.children) > bool(retracted)
            ):
                return False, cursor
            retracted.append(node)
            node = node.parent
        for each in retracted:
            del self._node_of[each.page]
            self.pool.stop_keeping(each.page)
            self._remove(each)
        return True, node if node is not None and node.parent is not None else None

    def leave(
        self,
        namespace: Namespace,
        cursor: Node | None,
        tokens: Sequence[int],
        pages: Sequence[int],
        stop: int,
    ) -> list[int]:
        """Publish the pages before page ``stop``, all computed, of a sequence that leaves.

        Returns:
            The pages that the sequence has to release, in the order in which it has to.
        """
        first = cursor.depth if cursor else 0
        held = list(pages[:first])
        for index in range(first, stop):
            parent = cursor or self._root(namespace)
            key = self._key(tokens, index)
            cursor = parent.children.get(key)
            if cursor is None:
                cursor = self._add(parent, key, pages[index], plan=0)
            elif self.pool.is_on_host(cursor.page):
                # The sequence's own page has the same content and is on the device.
                place = cursor.page
                self.pool.replace(place, pages[index])
                self._moved(cursor, pages[index])
            else:
                self.pool.share([cursor.page])
                held.append(cursor.page)
            held.append(pages[index])
        held.extend(pages[max(first, stop) :])
        held.reverse()
        return held

    def path(self, namespace: Namespace, tokens: Sequence[int], num_pages: int) -> list[Node]:
        """Return the nodes of the first ``num_pages`` pages of ``tokens``, as far as they exist."""
        found: list[Node] = []
        node = self.find_root(namespace)
        for index in range(num_pages):
            node = None if node is None else node.children.get(self._key(tokens, index))
            if node is None:
                break
            found.append(node)
        return found

    def evict(self, count: int) -> tuple[int, int]:
        """Free ``count`` idle pages, in the order of rule 4. There must be as many.

        Returns:
            The number of pages moved to the host, and the number of pages lost, from the device or
            the host.
        """
        num_offloaded = num_lost = 0
        for _ in range(count):
            page = self.pool.next_idle()
            node = self._node_of[page]
            num_lost += self.free_host_place(self.pool.level(page))
            if self.pool.host.num_free:
                place = self.pool.offload(page)
                self.copies.append((page, place))
                self._moved(node, place)
                self.on_offloaded(node)
                num_offloaded += 1
            else:
                num_lost += self._lose(node)
        return num_offloaded, num_lost

    def _lose(self, node: Node) -> int:
        """Remove ``node``, and those below it, which are on the host; return their number."""
        lost = [node]
        for each in lost:
            lost.extend(each.children.values())
        for each in reversed(lost):
            self._discard(each)
        return len(lost)

    def free_host_place(self, level: int) -> bool:
        """Free a place on the host for a page of ``level``, unless all stored pages are worth more.

        Returns:
            True if a stored page was lost for it.
        """
        host = self.pool.host
        oldest = None if host.num_free else host.next()
        if oldest is None or self.pool.level(oldest) > level:
            return False
        self._discard(self._node_of[oldest])
        return True

    def load(self, nodes: Sequence[Node]) -> list[int]:
        """Copy the pages of ``nodes``, pinned on the host, back to the device.

        There must be as many free pages; each has one holder afterwards.

        Returns:
            The pages.
        """
        for node in nodes:
            place = node.page
            page = self.pool.load(place)
            self.copies.append((place, page))
            self._moved(node, page)
        return [node.page for node in nodes]

    def pin(self, nodes: Iterable[Node]) -> None:
        """Keep ``nodes``, which are on the host, there until :meth:`load`."""
        for node in nodes:
            self.pool.host.pin(node.page)

    def adopt(self, namespace: Namespace, parent: Node | None, tokens: bytes, place: int) -> Node:
        """Return the page with ``tokens`` below ``parent``, or the root if that is None.

        If it isn't in the tree, add it: its content is in ``place`` on the host.
        """
        above = parent or self._root(namespace)
        return above.children.get(tokens) or self._insert(above, tokens, place, plan=0)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the copies to be done before the next plan's rows are computed."""
        copies, self.copies = self.copies, []
        return copies

    def drop(self, is_dropped: Callable[[Namespace], bool]) -> None:
        """Remove the namespaces for which ``is_dropped`` is true; no sequence may match them later.

        Their pages are free as soon as no sequence holds them.
        """
        nodes = [root for namespace, root in self._roots.items() if is_dropped(namespace)]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):  # Deepest first.
            if node.parent is not None:
                self._discard(node)

    def flush(self) -> int:
        """Free idle pages, and hide those that sequences hold; return the number of freed pages.

        Held pages move to a namespace that no new sequence uses. Their holders go on in the
        :meth:`flushed` form of their own namespace.
        """
        on_host = [self._node_of[place] for place in self.pool.host.stored()]
        freed = len(on_host) + self.pool.num_idle
        for node in sorted(on_host, key=lambda node: -node.depth):
            self._discard(node)
        while self.pool.num_idle:
            self._discard(self._node_of[self.pool.next_idle()])
        self.events.on_cleared()
        if self._indexed is not None:
            self._indexed.forget(self._node_of.values())
        self.num_flushes += 1
        roots, self._roots = self._roots, {}
        for root in roots.values():
            root.key = flushed = self.flushed(root.namespace)
            self._roots[flushed] = root
        self.priorities.reset(self._node_of.values())
        return freed

    def flushed(self, namespace: Namespace) -> Namespace:
        """Return the namespace that pages of ``namespace`` have since the last :meth:`flush`."""
        return (*namespace, FLUSHED, self.num_flushes)

    def _key(self, tokens: Sequence[int], index: int) -> bytes:
        return from_ints(tokens[index * self.page_size : (index + 1) * self.page_size])

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(None, namespace, NO_PAGE, plan=0, depth=0)
        return root

    def _discard(self, node: Node) -> None:
        """Remove ``node`` from the tree and free its page."""
        assert not node.children, "a page was evicted from under its children"
        del self._node_of[node.page]
        self.pool.discard(node.page)
        self._remove(node)

    def _moved(self, node: Node, page: int) -> None:
        """Note that the page of ``node`` is now ``page``."""
        del self._node_of[node.page]
        node.page = page
        self._node_of[page] = node
        if self._indexed is not None:
            self._indexed.on_moved(node, on_host=self.pool.is_on_host(page))
        if self.events.feed.is_wanted:
            self.events.on_moved(node, on_host=self.pool.is_on_host(page))

    def _remove(self, node: Node) -> None:
        """Remove ``node``, a leaf, from the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self.priorities.on_removed(node)
        if self._indexed is not None:
            self._indexed.on_removed(node)
        if self.events.feed.is_wanted:
            self.events.on_removed(node)
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    def _add(self, parent: Node, key: bytes, page: int, plan: int) -> Node:
        self.pool.keep(page)
        return self._insert(parent, key, page, plan)

    def _insert(self, parent: Node, key: bytes, page: int, plan: int) -> Node:
        node = parent.children[key] = Node(parent, key, page, plan, parent.depth + 1)
        self._node_of[page] = node
        self.priorities.on_added(node)
        if self._indexed is not None:
            self._indexed.on_added(node, on_host=self.pool.is_on_host(page))
        if self.events.feed.is_wanted:
            self.events.on_stored(node, on_host=self.pool.is_on_host(page))
        return node
