"""What a program holds, and whether anything is left of what was done in it.

::

    async with open_engine(...) as engine:
        before = await Holdings.now()
        ...  # faults
        await nothing_held(engine)
        await nothing_left(before)

The first engine of a program starts threads of libraries that stay: look from within one, or let
``nothing_left`` look at the other sorts of things alone. Tests use it, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import trio
import trio.testing

from bench.faults.processes import children_of
from trioserve import Engine
from trioserve.protocol.errors import WorkerLost


class Leftovers(AssertionError):
    """Something is held that shouldn't be; the message says what."""


def living_tasks() -> list[trio.lowlevel.Task]:
    """Every task of this trio program, parents before their children."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else [root]
    for task in tasks:
        for nursery in task.child_nurseries:
            tasks += sorted(nursery.child_tasks, key=lambda child: child.name)
    return tasks


@attrs.frozen(kw_only=True)
class Holdings:
    """What this program holds, each thing by its kind and how many there are of it.

    ``folders`` are those of workers' sockets in the program's folder for temporary files. Threads
    that trio keeps for the next call of ``to_thread`` aren't counted; they end by themselves.
    """

    tasks: Counter[str]
    descriptors: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    folders: Counter[str]

    @classmethod
    async def now(cls) -> Holdings:
        """What is held at this moment. Only what has just ended may still be counted."""
        await trio.testing.wait_all_tasks_blocked()
        return cls.at_once()

    @classmethod
    def at_once(cls) -> Holdings:
        """The same, without a moment for others."""
        temporary = Path(tempfile.gettempdir())
        return cls(
            tasks=Counter(task.name for task in living_tasks()),
            descriptors=Counter(_kinds_of_descriptors()),
            threads=Counter(_names_of_threads()),
            children=Counter(_name(pid) for pid in children_of(os.getpid())),
            folders=Counter(str(folder) for folder in temporary.glob("trioserve-*")),
        )

    def more_than(self, before: Holdings, sorts: Sequence[str]) -> dict[str, dict[str, int]]:
        """What there is more of than ``before``: how many more, by sort and kind."""
        extra = {sort: getattr(self, sort) - getattr(before, sort) for sort in sorts}
        return {sort: dict(counts) for sort, counts in extra.items() if counts}


SORTS = tuple(field.name for field in attrs.fields(Holdings))
OUTSIDE = ("tasks", "children", "folders")
"""What the first engine of a program leaves none of, either."""


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder in which this program, and nobody else, keeps its temporary files meanwhile."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


def _kinds_of_descriptors() -> list[str]:
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # it is the one that the folder itself was read with
            continue
        if target == f"/proc/{os.getpid()}/fd":
            continue
        kinds.append(re.sub(r"\d+", "N", target))
    return kinds


def _names_of_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:  # it has just ended
            continue
        if not name.startswith("Trio thread"):
            names.append(re.sub(r"\d+", "N", name))
    return names


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


async def nothing_left(
    before: Holdings, *, sorts: Sequence[str] = SORTS, within: float = 20.0
) -> None:
    """Wait until the program holds no more than ``before``; nng and the kernel take a moment.

    Args:
        before: what it may hold.
        sorts: the fields of :class:`Holdings` to look at.
        within: seconds.

    Raises:
        Leftovers: it still does after ``within`` seconds.
    """
    deadline = trio.current_time() + within
    while more := (await Holdings.now()).more_than(before, sorts):
        if trio.current_time() > deadline:
            raise Leftovers(f"left after {within:g} s: {more}")
        await trio.sleep(0.05)


async def nothing_held(engine: Engine, *, within: float = 20.0) -> None:
    """Wait until the engine and its worker have nothing to do and hold nothing.

    Looks at the page pool, the queue and the streams on this side, and at the slots and the pages
    on the worker's.

    Raises:
        Leftovers: something is still held after ``within`` seconds.
        AssertionError: an invariant of the engine is broken.
    """
    held: dict[str, int] = {"unknown": 1}
    with trio.move_on_after(within):
        while held:
            try:
                held = await _held(engine)
            except WorkerLost:
                held = {"worker": -1}
            if held:
                await trio.sleep(0.01)
    if held:
        raise Leftovers(f"the engine holds after {within:g} s: {held}")
    engine.check_integrity()
    scheduler = engine.statistics().scheduler
    if scheduler.pages_free + scheduler.pages_cached != scheduler.pages_total:
        raise Leftovers(f"pages are missing: {scheduler}")


async def _held(engine: Engine) -> dict[str, int]:
    worker = await engine.call_worker("statistics")
    statistics = engine.statistics()
    scheduler = statistics.scheduler
    held = {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "plans in flight": scheduler.plans_in_flight,
        "pages": scheduler.pages_held,
        "entering": statistics.num_tokenizing,
        "streams": statistics.num_streams,
        "bytes for readers": statistics.stream_bytes,
        "worker's slots": worker["open_slots"],
        "worker's pages": worker["pages_used"],
    }
    return {name: count for name, count in held.items() if count}
