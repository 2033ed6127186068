"""The things that a program holds, and checks that nothing is left of what was done in it.

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
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import trio
import trio.testing

from tests.faults.load import Steady
from tests.faults.stage import children_of
from trioserve import Engine
from trioserve.protocol.errors import WorkerLost


class Leftovers(AssertionError):
    """Something is held that shouldn't be; the message says what."""


def living_tasks() -> list[trio.lowlevel.Task]:
    """Return every task of this trio program, parents before their children."""
    root = trio.lowlevel.current_root_task()
    tasks = [] if root is None else [root]
    for task in tasks:
        for nursery in task.child_nurseries:
            tasks += sorted(nursery.child_tasks, key=lambda child: child.name)
    return tasks


@attrs.frozen(kw_only=True)
class Holdings:
    """The things that this program holds, counted by kind.

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
        """Return what is held at this moment, when all tasks wait."""
        await trio.testing.wait_all_tasks_blocked()
        return cls.at_once()

    @classmethod
    def at_once(cls) -> Holdings:
        """Return what is held, without a moment for other tasks."""
        fds = _of(Path("/proc/self/fd").iterdir(), os.readlink)
        own = f"/proc/{os.getpid()}/fd"
        threads = _of(Path("/proc/self/task").iterdir(), lambda task: _text(task / "comm"))
        children = [Path(f"/proc/{pid}/comm") for pid in children_of(os.getpid())]
        temporary = Path(tempfile.gettempdir())
        return cls(
            tasks=Counter(task.name for task in living_tasks()),
            descriptors=Counter(re.sub(r"\d+", "N", target) for target in fds if target != own),
            threads=Counter(
                re.sub(r"\d+", "N", name) for name in threads if not name.startswith("Trio thread")
            ),
            children=Counter(_of(children, _text)),
            folders=Counter(str(folder) for folder in temporary.glob("trioserve-*")),
        )

    def more_than(self, before: Holdings, sorts: Sequence[str]) -> dict[str, dict[str, int]]:
        """Return what there is more of than ``before``, by sort and kind."""
        extra = {sort: getattr(self, sort) - getattr(before, sort) for sort in sorts}
        return {sort: dict(counts) for sort, counts in extra.items() if counts}


SORTS = tuple(field.name for field in attrs.fields(Holdings))
OUTSIDE = ("tasks", "children", "folders")
"""The sorts of which the first engine of a program leaves none, either."""


def _text(path: Path) -> str:
    return path.read_text().strip()


def _of(paths: Iterable[Path], read: object) -> list[str]:
    """Return what ``read`` gives of each path; what has just ended is left out."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(read(path))  # type: ignore[operator]
    return found


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """Have this program keep its temporary files in a folder of its own meanwhile."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before


async def nothing_left(
    before: Holdings, *, sorts: Sequence[str] = SORTS, within: float = 20.0
) -> None:
    """Wait until the program holds no more than ``before``; raise :class:`Leftovers` in the end.

    nng and the kernel take a moment. ``sorts`` are fields of :class:`Holdings`.
    """
    deadline = trio.current_time() + within
    while more := (await Holdings.now()).more_than(before, sorts):
        if trio.current_time() > deadline:
            raise Leftovers(f"left after {within:g} s: {more}")
        await trio.sleep(0.05)


async def nothing_held(engine: Engine, *, within: float = 20.0) -> None:
    """Wait until the engine and its worker have nothing to do and hold nothing.

    Looks at the page pool, the queue and the streams on this side, and at the slots and the pages
    on the worker's; raises :class:`Leftovers` in the end. The engine's invariants are checked, too.
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


@contextlib.asynccontextmanager
async def nothing_of_it(engine: Engine, load: Steady) -> AsyncIterator[None]:
    """Run ``load`` for as long as the block lasts; nothing may be left of it and of the block."""
    await load.learn()
    await nothing_held(engine)
    before = await Holdings.now()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        yield
        load.end()
    await nothing_held(engine)
    await nothing_left(before)
