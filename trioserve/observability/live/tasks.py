"""The tree of trio's tasks as a picture shows it: names and states, those that look alike as one.

It tells no stacks: reading one costs more than all else, and they are for operators
(:mod:`trioserve.observability.task_dump`).
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
"""Tasks that are looked at, those nearest to the root first."""
MAX_IN_NURSERY = 50
"""Tasks of one nursery that are looked at: a server has one for each of its connections."""


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
    """The tasks below ``root``, which is all of the trio program that runs by default."""
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
    """``nodes`` with those that are alike as one, where the first of them was."""
    kinds: dict[bytes, list[TaskNode]] = {}
    for node in nodes:
        kinds.setdefault(msgspec.msgpack.encode(node), []).append(node)
    return [
        msgspec.structs.replace(alike[0], count=len(alike)) if len(alike) > 1 else alike[0]
        for alike in kinds.values()
    ]
