"""Each worker's share of the cores, on machines as Linux numbers their cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from trioserve.engine.core_shares import CoreShare, share_among_ranks, share_cores
from trioserve.protocol.devices import cores_from, cores_text
from trioserve.protocol.machine import Machine

ONE_NODE = ["0-7"]
TWO_SOCKETS = ["0-63,128-191", "64-127,192-255"]  # two threads a core: 128 is the sibling of 0
ALTERNATING = ["0,2,4,6,8,10", "1,3,5,7,9,11"]
FOUR_NODES = ["0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63"]
UNEVEN = ["0-11", "12-23", "24-31", "32-43"]
MEMORY_ONLY = ["0-15", "16-31", ""]
MANY = [str(core) for core in range(32)]


def machine(root: Path, nodes: Sequence[str]) -> Machine:
    """Return a machine with the files of these nodes."""
    for number, cores in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
        (folder / "cpumap").write_text("ff\n")
    (root / "sys/devices/system/node/online").parent.mkdir(parents=True, exist_ok=True)
    (root / "sys/devices/system/node/online").write_text("0\n")
    return Machine(root)


def shares(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: Sequence[str],
    count: int,
    *,
    allowed: str | None = None,
    limit: float | None = None,
) -> list[tuple[str, int]]:
    """Return each worker's cores and threads on a machine with these nodes."""
    mask = {core for node in nodes for core in cores_from(node)} if allowed is None else None
    mask = set(cores_from(allowed or "")) if mask is None else mask
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: mask)
    found = share_cores(machine(root, nodes).nodes(), count, limit or len(mask))
    return [(cores_text(each.cores), each.num_threads) for each in found]


@pytest.mark.parametrize(
    ("nodes", "count", "expected"),
    [
        (ONE_NODE, 2, [("", 4), ("", 4)]),
        (ONE_NODE, 3, [("", 2)] * 3),
        (ONE_NODE, 20, [("", 1)] * 20),
        (TWO_SOCKETS, 2, [(node, 128) for node in TWO_SOCKETS]),
        (TWO_SOCKETS, 3, [(TWO_SOCKETS[0], 64), (TWO_SOCKETS[0], 64), (TWO_SOCKETS[1], 128)]),
        (TWO_SOCKETS, 4, [(node, 64) for node in TWO_SOCKETS for _ in range(2)]),
        (ALTERNATING, 2, [(node, 6) for node in ALTERNATING]),
        (FOUR_NODES, 2, [("0-15,32-47", 32), ("16-31,48-63", 32)]),
        (FOUR_NODES, 3, [*[(node, 16) for node in FOUR_NODES[:2]], ("16-31,48-63", 32)]),
        (FOUR_NODES, 4, [(node, 16) for node in FOUR_NODES]),
        (FOUR_NODES, 8, [(node, 8) for node in FOUR_NODES for _ in range(2)]),
        (UNEVEN, 4, [("0-11", 12), ("12-23", 12), ("24-31", 8), ("32-43", 12)]),
        (UNEVEN, 2, [("0-23", 24), ("24-43", 20)]),
        (UNEVEN, 5, [("0-11", 6), ("0-11", 6), ("12-23", 12), ("24-31", 8), ("32-43", 12)]),
        (MANY, 3, [("0-7", 8), ("8-19", 12), ("20-31", 12)]),
        (MEMORY_ONLY, 2, [("0-15", 16), ("16-31", 16)]),
    ],
)
def test_workers_are_bound_to_nodes(
    nodes: Sequence[str],
    count: int,
    expected: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shares(tmp_path, monkeypatch, nodes, count) == expected


@pytest.mark.parametrize(
    ("allowed", "count", "expected"),
    [
        ("0-15", 2, [("", 8), ("", 8)]),  # one node is left
        ("60-67", 2, [("60-63", 4), ("64-67", 4)]),
        ("0-31,64-69", 2, [("", 19), ("", 19)]),  # 6 are less than half of an equal share
        ("0-31,64-75", 2, [("0-31", 32), ("64-75", 12)]),
        ("3", 2, [("", 1), ("", 1)]),
    ],
)
def test_a_narrow_affinity_is_respected(
    allowed: str,
    count: int,
    expected: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shares(tmp_path, monkeypatch, TWO_SOCKETS, count, allowed=allowed)
    assert found == expected


def test_a_quota_bounds_the_threads_and_not_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shares(tmp_path, monkeypatch, TWO_SOCKETS, 2, limit=8.5)
    assert found == [(node, 4) for node in TWO_SOCKETS]


@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_SOCKETS, FOUR_NODES, UNEVEN])
@pytest.mark.parametrize("count", range(2, 20))
def test_siblings_stay_together_and_every_core_is_used(nodes: Sequence[str], count: int) -> None:
    every = [cores_from(node) for node in nodes]
    total = sum(map(len, every))
    found = share_cores(every, count, total)
    assert len(found) == count
    assert sum(each.num_threads for each in found) <= max(total, count)
    used: set[int] = set()
    for each in found:
        bound = set(each.cores) or set(range(total))
        assert all(bound.isdisjoint(node) or bound.issuperset(node) for node in every)
        assert each.num_threads <= len(bound)
        used |= bound
    assert used == {core for node in every for core in node}


@pytest.mark.parametrize(
    ("nodes", "count", "num_ranks", "expected"),
    [
        (ONE_NODE, 1, 2, [((), 0)]),
        (ONE_NODE, 2, 2, [((), 4), ((), 4)]),
        (TWO_SOCKETS, 1, 2, [(TWO_SOCKETS, 256)]),
        (TWO_SOCKETS, 1, 4, [([TWO_SOCKETS[0]] * 2 + [TWO_SOCKETS[1]] * 2, 256)]),
        (TWO_SOCKETS, 2, 2, [([node] * 2, 128) for node in TWO_SOCKETS]),
        (FOUR_NODES, 1, 2, [(["0-15,32-47", "16-31,48-63"], 64)]),
        (FOUR_NODES, 2, 2, [(FOUR_NODES[:2], 32), (FOUR_NODES[2:], 32)]),
        # The third rank has a node alone, and computes with as many threads as the others.
        (TWO_SOCKETS, 1, 3, [([TWO_SOCKETS[0]] * 2 + [TWO_SOCKETS[1]], 192)]),
        (UNEVEN, 1, 4, [(UNEVEN, 32)]),
    ],
)
def test_ranks_are_bound_to_nodes(
    nodes: Sequence[str], count: int, num_ranks: int, expected: list[tuple[Sequence[str], int]]
) -> None:
    every = [cores_from(node) for node in nodes]
    found = share_among_ranks(every, count, num_ranks, sum(map(len, every)))
    bound = [([cores_text(cores) for cores in each.rank_cores], each.num_threads) for each in found]
    assert bound == [(list(ranks), threads) for ranks, threads in expected]
    for each in found:
        assert each.cores == (each.rank_cores[0] if each.rank_cores else ())


def test_a_worker_alone_has_all_cores() -> None:
    assert share_cores([[0, 1], [2, 3]], 1, 4) == [CoreShare()]
    assert share_cores([[0, 1], [2, 3]], 0, 4) == []


def test_a_machine_without_nodes_has_one(tmp_path: Path) -> None:
    assert Machine(tmp_path).nodes() == [sorted(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,5", [0, 1, 2, 5]), ("7", [7]), ("", []), ("3-1,2", [1, 2, 3])]
)
def test_lists_of_cores(text: str, cores: list[int]) -> None:
    assert cores_from(text) == cores
    assert cores_from(cores_text(cores)) == cores
