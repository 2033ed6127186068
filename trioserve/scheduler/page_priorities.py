"""Eviction levels of the prefix cache's pages.

A page has a priority of its own, either for ever or until a time. It is the default one unless a
request said otherwise (:mod:`trioserve.requests.retention`). Eviction goes by the page's **level**:
the highest of its own priority, the levels of the pages right below it, and the **pins** on it. A
pin protects a whole path, such as a session's conversation. It is recorded at the deepest page of
the path; if that page is evicted nevertheless, the pin moves to its parent.

So a page's level is at least that of each page below it, and eviction by level never reaches a page
before its children (rule 4 of :mod:`~trioserve.scheduler.prefix_cache`). This must also hold within
a level: when a page is raised, its ancestors on the same level are moved behind it. A page counts
as newly idle when its level changes.

Only deviations from the default are stored, so all other pages cost nothing here.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable

import attrs

from trioserve.requests.retention import DEFAULT_PRIORITY
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_tree import Node

_SPARE_EXPIRIES = 64


@attrs.define(eq=False, repr=False)
class Priorities:
    """The levels of the pages of ``pool``. Times are in seconds."""

    pool: PagePool
    next_expiry: float = attrs.field(init=False, default=math.inf)
    """Time before which :meth:`expire` has nothing to do."""
    _own: dict[Node, tuple[int, float]] = attrs.field(init=False, factory=dict)
    """Priority of its own and expiry, by node."""
    _below: dict[Node, dict[int, int]] = attrs.field(init=False, factory=dict)
    """Number of a node's children on each level other than the default."""
    _pins: dict[str, Node] = attrs.field(init=False, factory=dict)
    """Node at which each pin is recorded, by the pin's name."""
    _held: dict[Node, dict[str, int]] = attrs.field(init=False, factory=dict)
    """Names and priorities of the pins at each node."""
    _expiries: list[tuple[float, int, Node]] = attrs.field(init=False, factory=list)
    """Heap of expiries; entries may be outdated, in which case ``_own`` is right."""
    _numbers: itertools.count[int] = attrs.field(init=False, factory=itertools.count)

    # ---- changes of the tree

    def on_added(self, node: Node) -> None:
        """Note that ``node`` was added to the tree, as a leaf with the default priority."""
        parent = node.parent
        assert parent is not None
        if parent.parent is not None and self.pool.level(parent.page) < DEFAULT_PRIORITY:
            self._update(parent)

    def on_removed(self, node: Node) -> None:
        """Note that ``node``, a leaf, was removed from the tree."""
        parent = node.parent
        assert parent is not None
        level = self.pool.level(node.page)
        if level != DEFAULT_PRIORITY:
            self.pool.set_level(node.page, DEFAULT_PRIORITY)
            self._count(parent, level, DEFAULT_PRIORITY)
        self._own.pop(node, None)
        for name, priority in self._held.pop(node, {}).items():
            if parent.parent is None:
                del self._pins[name]
            else:
                self._pins[name] = parent
                self._held.setdefault(parent, {})[name] = priority
        if parent.parent is not None and (
            self.pool.level(parent.page) != DEFAULT_PRIORITY
            or parent in self._own
            or parent in self._held
        ):
            self._update(parent)

    def reset(self, nodes: Iterable[Node]) -> None:
        """Give all ``nodes``, which are all nodes of the tree, the default level, without pins."""
        self._own.clear()
        self._below.clear()
        self._pins.clear()
        self._held.clear()
        self._expiries.clear()
        self.next_expiry = math.inf
        for node in nodes:
            if self.pool.level(node.page) != DEFAULT_PRIORITY:
                self.pool.set_level(node.page, DEFAULT_PRIORITY)

    # ---- priorities and pins

    def set_own(self, node: Node, priority: int, expires: float = math.inf) -> None:
        """Give ``node`` a priority of its own that ends at the time ``expires``."""
        if priority == DEFAULT_PRIORITY:
            self._own.pop(node, None)
        else:
            self._own[node] = priority, expires
            if expires < math.inf:
                self._expect(expires, node)
        self._update(node)

    def _expect(self, expires: float, node: Node) -> None:
        if len(self._expiries) > 2 * self.pool.num_pages + _SPARE_EXPIRIES:
            self._expiries = [
                (until, next(self._numbers), each)
                for each, (_, until) in self._own.items()
                if until < math.inf and each is not node
            ]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (expires, next(self._numbers), node))
        self.next_expiry = self._expiries[0][0]

    def expire(self, now: float) -> None:
        """Reset the priorities that have expired by ``now``."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, node = heapq.heappop(self._expiries)
            own = self._own.get(node)
            if own is not None and own[1] <= now:
                del self._own[node]
                self._update(node)
        self.next_expiry = self._expiries[0][0] if self._expiries else math.inf

    def pin(self, name: str, node: Node, priority: int) -> None:
        """Keep the path to ``node`` on the level ``priority`` at least, until :meth:`unpin`.

        An earlier pin of the same name ends.
        """
        former = self._pins.get(name)
        self._pins[name] = node
        self._held.setdefault(node, {})[name] = priority
        self._update(node)
        # Only now, so that the pages of both paths keep their level.
        if former is not None and former is not node:
            self._end_pin(name, former)

    def unpin(self, name: str) -> None:
        """Remove the pin of that name, if there is one."""
        node = self._pins.pop(name, None)
        if node is not None:
            self._end_pin(name, node)

    def _end_pin(self, name: str, node: Node) -> None:
        held = self._held[node]
        del held[name]
        if not held:
            del self._held[node]
        self._update(node)

    def pin_names(self) -> set[str]:
        """Return the names of all pins."""
        return set(self._pins)

    # ---- levels

    def level_of(self, node: Node) -> int:
        """Return the level that ``node`` must have, given the levels below it."""
        own, _ = self._own.get(node, (DEFAULT_PRIORITY, math.inf))
        below = self._below.get(node)
        num_unusual = 0
        level = own
        if below is not None:
            level = max(level, *below)
            num_unusual = sum(below.values())
        if level < DEFAULT_PRIORITY and len(node.children) > num_unusual:
            level = DEFAULT_PRIORITY
        held = self._held.get(node)
        return level if held is None else max(level, *held.values())

    def _update(self, node: Node) -> None:
        """Update the levels of ``node`` and its ancestors after a change at or below it."""
        raised_to = -1
        while node.parent is not None:
            old, new = self.pool.level(node.page), self.level_of(node)
            if new == old and new != raised_to:
                return
            if new > old:
                raised_to = new
            self.pool.set_level(node.page, new)
            if new != old:
                self._count(node.parent, old, new)
            node = node.parent

    def _count(self, parent: Node, old: int, new: int) -> None:
        """Count that a child of ``parent`` changed its level, or was removed from ``old``."""
        if parent.parent is None:
            return
        below = self._below.setdefault(parent, {})
        if old != DEFAULT_PRIORITY:
            below[old] -= 1
            if not below[old]:
                del below[old]
        if new != DEFAULT_PRIORITY:
            below[new] = below.get(new, 0) + 1
        if not below:
            del self._below[parent]

    # ---- assertions

    def check(self, nodes: Iterable[Node]) -> None:
        """Assert that all levels are right; ``nodes`` are all nodes of the tree."""
        known = set(nodes)
        for kept in (self._own, self._below, self._held):
            assert kept.keys() <= known, "a record is left of a removed page"
        for node in known:
            level = self.pool.level(node.page)
            assert level == self.level_of(node), f"page {node.page} is on a wrong level"
            below: dict[int, int] = {}
            for child in node.children.values():
                of_child = self.pool.level(child.page)
                assert of_child <= level, f"page {child.page} is worth more than its parent"
                if of_child != DEFAULT_PRIORITY:
                    below[of_child] = below.get(of_child, 0) + 1
            assert below == self._below.get(node, {}), "levels below a page are miscounted"
        pins = {name: node for node, held in self._held.items() for name in held}
        assert pins == self._pins, "a pin is recorded at two pages, or at none"
        assert all(self._held.values()), "an empty set of pins was left behind"
        waits = {node for _, _, node in self._expiries}
        expiring = {node for node, (_, until) in self._own.items() if until < math.inf}
        assert expiring <= waits, "a priority will never expire"
        if self._expiries:
            assert self.next_expiry == self._expiries[0][0]
