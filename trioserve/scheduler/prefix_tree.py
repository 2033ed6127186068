"""The nodes of the prefix tree, and a match in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import attrs

from trioserve.scheduler.prefix_runs import PageRun

Namespace = tuple[Hashable, ...]
NO_PAGE = -1
FLUSHED = object()
"""Marker in the namespaces of flushed pages, which no request can match. A caller's salt never
equals it.
"""


@attrs.define(eq=False)
class Node:
    """A full page of a prompt or output; a root stands for the empty prompt."""

    parent: Node | None = attrs.field(repr=False)
    key: bytes | Namespace
    """Tokens of the page as on the wire; the namespace of a root."""
    page: int
    """Number of the page, or of a place on the host."""
    plan: int
    """Number of the plan that computes the page."""
    depth: int
    """Number of pages from the root to this one, inclusive."""
    children: dict[bytes | Namespace, Node] = attrs.field(factory=dict, repr=False)
    run: PageRun | None = attrs.field(init=False, default=None, repr=False)
    """PageRun in the index over all workers that has the page, or has been split below it."""
    key_outside: bytes | None = attrs.field(init=False, default=None, repr=False)
    """Key of the page outside the worker (:mod:`~trioserve.scheduler.page_keys`); None if it isn't
    known.
    """

    @property
    def root(self) -> Node:
        """The root above it."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def newest(self) -> Iterator[Node]:
        """Yield the nodes right below it, the newest first."""
        return reversed(self.children.values())

    @property
    def namespace(self) -> Namespace:
        """The namespace of a root."""
        assert isinstance(self.key, tuple)
        return self.key

    @property
    def tokens(self) -> bytes:
        """The tokens of a page, as on the wire."""
        assert isinstance(self.key, bytes)
        return self.key


@attrs.frozen
class PrefixMatch:
    """Cached pages that a prompt can use, from its start.

    Pages on the host, if any, come last. ``pending`` is set if the next plan could use more: the
    plan being built computes the page that comes next.
    """

    nodes: tuple[Node, ...] = ()
    num_on_host: int = 0
    pending: bool = False

    @property
    def pages(self) -> list[int]:
        """Pages on the device."""
        return [node.page for node in self.nodes[: len(self.nodes) - self.num_on_host]]

    @property
    def on_host(self) -> tuple[Node, ...]:
        """Pages that have to be loaded from the host."""
        return self.nodes[len(self.nodes) - self.num_on_host :]
