"""The share of each worker in the cores of this host: how many threads, and on which NUMA nodes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

_MOST_CUT = 12
"""Most nodes among which the best cuts are looked for; of more, neighbors are joined before."""


@attrs.frozen
class CoreShare:
    """One worker's share of the host's cores."""

    cores: tuple[int, ...] = ()
    """Cores that it is bound to; empty for all that the engine may use."""
    num_threads: int = 0
    """Number of threads that compute; 0 lets the worker choose."""
    rank_cores: tuple[tuple[int, ...], ...] = ()
    """Cores of each of its ranks, rank 0 included; empty if all have those of the worker."""


def share_cores(nodes: Sequence[Sequence[int]], count: int, limit: float) -> list[CoreShare]:
    """Return the shares of ``count`` workers, in the order of the nodes.

    Each is bound to the cores of one NUMA node, or of neighboring nodes if there are more nodes
    than workers. Workers of one node share all of its cores. A node with less than half of an equal
    share counts as a part of its neighbor. One worker, or workers of one node only, aren't bound.

    Args:
        nodes: The cores of each NUMA node that may be used.
        count: Number of workers.
        limit: Number of cores that all workers together may keep busy.
    """
    if count < 2:
        return [CoreShare()] * count
    parts = _parts(nodes, count)
    total = sum(map(len, parts))
    num_workers = [1] * len(parts)
    for _ in range(count - len(parts)):
        # One more where most cores remain for each.
        num_workers[_most([len(p) / (n + 1) for p, n in zip(parts, num_workers, strict=True)])] += 1
    return [
        CoreShare(
            tuple(part) if len(parts) > 1 else (),
            max(int(len(part) * limit / (total * workers)), 1),
        )
        for part, workers in zip(parts, num_workers, strict=True)
        for _ in range(workers)
    ]


def share_among_ranks(
    nodes: Sequence[Sequence[int]], count: int, num_ranks: int, limit: float
) -> list[CoreShare]:
    """Return the shares of ``count`` workers, each of which is ``num_ranks`` processes.

    A process has the share of cores that a worker of one process would have, and the processes of a
    worker have neighboring nodes. All compute with as many threads as the smallest share allows.

    Args:
        nodes: The cores of each NUMA node that may be used.
        count: Number of workers.
        num_ranks: Number of processes of each.
        limit: Number of cores that all together may keep busy.
    """
    shares = share_cores(nodes, count * num_ranks, limit)
    if num_ranks == 1:
        return shares
    if count == 1 and not shares[0].cores:
        return [CoreShare()]
    workers = [shares[first : first + num_ranks] for first in range(0, len(shares), num_ranks)]
    return [
        CoreShare(
            ranks[0].cores,
            num_ranks * min(each.num_threads for each in ranks),
            tuple(each.cores for each in ranks if each.cores),
        )
        for ranks in workers
    ]


def _parts(nodes: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the cores of at most ``count`` parts: nodes, or neighboring nodes joined."""
    parts = [list(node) for node in nodes]
    while len(parts) > _MOST_CUT:
        parts = _joined(parts, range(2, len(parts), 2))
    if len(parts) > count:
        ways = itertools.combinations(range(1, len(parts)), count - 1)
        parts = _joined(parts, min(ways, key=lambda cuts: max(map(len, _joined(parts, cuts)))))
    total = sum(map(len, parts))
    while len(parts) > 1 and 2 * count * min(map(len, parts)) < total:
        least = _most([-len(part) for part in parts])
        beside = [i for i in (least - 1, least + 1) if 0 <= i < len(parts)]
        first = min(least, min(beside, key=lambda i: len(parts[i])))
        parts[first : first + 2] = [sorted(parts[first] + parts[first + 1])]
    return parts


def _joined(parts: Sequence[Sequence[int]], cuts: Sequence[int]) -> list[list[int]]:
    """Return ``parts`` joined between ``cuts``."""
    spans = itertools.pairwise((0, *cuts, len(parts)))
    return [sorted(itertools.chain(*parts[first:last])) for first, last in spans]


def _most(values: Sequence[float]) -> int:
    """Return the index of the first of the greatest values."""
    return max(range(len(values)), key=lambda i: (values[i], -i))
