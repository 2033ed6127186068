"""The tree of trio's tasks in a snapshot: names and states, with equal tasks as one.

It has no stacks: reading them costs more than the rest of a snapshot. Operators get them from
:mod:`trioserve.observability.task_dump`.
"""

from __future__ import annotations

import itertools
from collections import deque

import attrs
import msgspec
import trio

from trioserve.observability.live.schema import TaskNode
from trioserve.observability.task_dump import order_of, state_of

MAX_TASKS = 500
"""The most tasks to look at, those nearest to the root first."""
MAX_IN_NURSERY = 50
"""The most tasks of one nursery to look at: a server has one for each connection."""


@attrs.define(eq=False)
class _Seen:
    task: trio.lowlevel.Task
    children: list[_Seen] = attrs.field(factory=list)
    num_left_out: int = 0


def task_tree(
    root: trio.lowlevel.Task | None = None,
    *,
    most: int = MAX_TASKS,
    most_in_nursery: int = MAX_IN_NURSERY,
) -> TaskNode:
    """Return the tasks below ``root``, by default those of the whole trio program."""
    root = root or trio.lowlevel.current_root_task()
    assert root is not None, "trio runs"
    seen = [_Seen(root)]
    left = deque(seen)
    while left:
        node = left.popleft()
        for nursery in node.task.child_nurseries:
            tasks = nursery.child_tasks
            room = min(most_in_nursery, most - len(seen))
            chosen = sorted(itertools.islice(tasks, room), key=order_of)
            node.num_left_out += len(tasks) - len(chosen)
            for task in chosen:
                child = _Seen(task)
                node.children.append(child)
                seen.append(child)
                left.append(child)
    made: dict[_Seen, TaskNode] = {}
    for node in reversed(seen):  # children before their parents
        made[node] = TaskNode(
            name=node.task.name,
            state=state_of(node.task),
            children=_folded([made.pop(child) for child in node.children]),
            num_left_out=node.num_left_out,
        )
    return made[seen[0]]


def _folded(nodes: list[TaskNode]) -> list[TaskNode]:
    """Return ``nodes`` with equal ones merged, in the place of the first."""
    kinds: dict[bytes, list[TaskNode]] = {}
    for node in nodes:
        kinds.setdefault(msgspec.msgpack.encode(node), []).append(node)
    return [
        msgspec.structs.replace(alike[0], count=len(alike)) if len(alike) > 1 else alike[0]
        for alike in kinds.values()
    ]
