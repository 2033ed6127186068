"""The prefix tree in a snapshot: a limited number of runs of pages."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping

from trioserve.observability.live.schema import Prefix, PrefixNode
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import Node

PAGES_FOR_EACH = 8
"""Pages to look at for each requested node. Past this number, a run is cut and its rest
left out.
"""
IDS_FOR_EACH = 1 << 32
"""Ids of runs for each worker; none has more pages."""


def prefix_of_all(caches: Mapping[int, PrefixCache], most: int) -> Prefix:
    """Return at most ``most`` runs of pages of the workers' caches, as many of each."""
    nodes: list[PrefixNode] = []
    left_out: dict[int, int] = {}
    for worker, cache in caches.items():
        prefix = prefix_of(cache, most // len(caches), worker)
        nodes += prefix.nodes
        left_out[worker] = prefix.num_left_out
    return Prefix(nodes=nodes, num_left_out=sum(left_out.values()), left_out_by_worker=left_out)


def prefix_of(cache: PrefixCache, most: int, worker: int = 0) -> Prefix:
    """Return at most ``most`` runs of pages, those nearest to the roots first.

    A run's id is the number of its first page, counted from the worker's first id.
    """
    first_id = worker * IDS_FOR_EACH
    pool = cache.pool

    def look_of(node: Node) -> tuple[int, bool]:
        on_host = pool.is_on_host(node.page)
        return 0 if on_host else pool.holders(node.page), on_host

    nodes: list[PrefixNode] = []
    num_seen, most_seen = 0, most * PAGES_FOR_EACH
    left: deque[tuple[Node, int | None]] = deque()
    for root in itertools.islice(cache.roots(), most):
        _append_children(left, root, None, most)
    while left and len(nodes) < most and num_seen < most_seen:
        first, parent = left.popleft()
        look = look_of(first)
        last, num_pages = first, 1
        while len(last.children) == 1 and num_seen + num_pages < most_seen:
            (child,) = last.children.values()
            if look_of(child) != look:
                break
            last = child
            num_pages += 1
        num_seen += num_pages
        users, on_host = look
        id = first_id + first.page
        nodes.append(
            PrefixNode(
                id=id, worker=worker, parent=parent, pages=num_pages, users=users, on_host=on_host
            )
        )
        _append_children(left, last, id, most - len(nodes))
    return Prefix(nodes=nodes, num_left_out=cache.num_nodes - num_seen)


def _append_children(
    left: deque[tuple[Node, int | None]], node: Node, parent: int | None, most: int
) -> None:
    room = max(most - len(left), 0)
    for child in itertools.islice(reversed(node.children.values()), room):
        left.append((child, parent))
