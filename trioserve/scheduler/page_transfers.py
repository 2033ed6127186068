"""The transfers of pages to the disk, and from there or from siblings, while a worker is attached.

One task has pages written to the disk, one has pages fetched that sequences wait for, and one has
pages fetched ahead, a transfer at a time each. What is transferred is decided in
:mod:`~trioserve.scheduler.disk_pages` and :mod:`~trioserve.scheduler.fetched_pages`. A transfer
that fails costs no request anything: its pages are computed when they are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import trio

from trioserve._util.conditions import Conditions
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import CallFailed
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.disk_pages import DiskPages, Write
from trioserve.scheduler.fetched_pages import Fetch, FetchedPages
from trioserve.scheduler.page_keys import KEY_BYTES
from trioserve.scheduler.siblings import Sibling

_log = get_logger("trioserve.scheduler")


@attrs.define(eq=False)
class _Transfers:
    core: SchedulerCore
    call: WorkerCall
    conditions: Conditions
    wake: Callable[[], None]
    _has_failed: bool = attrs.field(init=False, default=False)

    def disk(self) -> DiskPages:
        """Return the pages on disk of the present memory, which a reset replaces."""
        disk = self.core.memory.disk
        assert disk is not None
        return disk

    async def write_all(self) -> None:
        """Learn which pages are on disk; have others written as they move to the host."""
        await self.list_pages()
        while True:
            await self.conditions.wait_for(
                lambda: self.disk().has_unwritten or self.core.disk_index.due != ""
            )
            disk = self.disk()
            if disk.index.due:
                await self._follow_flush()
                continue
            write = disk.next_write()
            if write is not None:
                written, removed = await self._write(write)
                self.core.counters.pages_written += sum(written)
                disk.end_write(write, written, removed)
                self.conditions.notify()

    def fetched(self) -> FetchedPages:
        """Return the fetching of pages for the present memory, which a reset replaces."""
        fetched = self.core.memory.fetched
        assert fetched is not None
        return fetched

    async def fetch_all(self, ahead: bool = False) -> NoReturn:
        """Have pages fetched that sequences wait for, or those ``ahead``."""
        while True:
            await self.conditions.wait_for(lambda: self.fetched().wants(ahead=ahead))
            fetched = self.fetched()
            fetch = fetched.next_fetch(ahead=ahead)
            if fetch is not None:
                began = trio.current_time()
                num_fetched = await self._fetch(fetched, fetch)
                # A part of the time ahead may be that of the step which computes the pages.
                if num_fetched and not ahead:
                    seconds = trio.current_time() - began
                    fetch.found.source.pace.learn(num_fetched, seconds)
                fetched.end(fetch, num_fetched)
            self.wake()

    async def _write(self, write: Write) -> tuple[list[bool], list[bytes]]:
        """Return which pages were written, and the keys of those deleted for them."""
        arguments = {"keys": write.keys, "places": write.places}
        match await self._ask("write_pages", arguments):
            case [[*written], [*removed]] if len(written) == len(write.keys):
                return written, removed
        return [False] * len(write.keys), []

    async def _fetch(self, fetched: FetchedPages, fetch: Fetch) -> int:
        """Return the number of pages that were fetched, up to the first that isn't there."""
        loan = fetch.found.loan
        if loan is None:
            num_read = await self._read(fetch)
            self.core.counters.pages_read += num_read
            return num_read

        async def call(name: str, arguments: object = None, *, num_bytes: int = 0) -> Any:
            # The places of a memory from before a reset are used for other pages.
            if self.fetched() is not fetched:
                return None
            return await self._ask(name, arguments, num_bytes=num_bytes)

        is_far = self.core.limits.is_far
        num_fetched = await loan.fetch(fetch.keys, fetch.places, call, is_far=is_far)
        self.core.counters.pages_imported += num_fetched
        return num_fetched

    async def _read(self, fetch: Fetch) -> int:
        match await self._ask("read_pages", {"keys": fetch.keys, "places": fetch.places}):
            case int(number) if 0 <= number <= len(fetch.keys):
                return number
        return 0

    async def _ask(self, name: str, arguments: object = None, *, num_bytes: int = 0) -> Any:
        """Call the worker; return None and log the first time if it can't."""
        try:
            return await self.call(name, arguments, num_bytes=num_bytes)
        except CallFailed as error:
            if not self._has_failed:
                _log.error("pages not transferred", call=name, reason=str(error))
            self._has_failed = True
            return None

    async def _follow_flush(self) -> None:
        """Have the files deleted after the cache was emptied, or those of other weights listed."""
        index = self.core.disk_index
        due, index.due = index.due, ""
        if due == "list_pages":
            await self.list_pages()
        else:
            await self._ask(due, None)

    async def list_pages(self) -> None:
        """Learn which pages are on disk."""
        match await self._ask("list_pages", None):
            case {"folder": str(folder), "keys": bytes(keys)}:
                every = range(0, len(keys), KEY_BYTES)
                self.core.disk_index.use(folder, (keys[at : at + KEY_BYTES] for at in every))


async def transfer_pages(
    core: SchedulerCore,
    call: WorkerCall,
    *,
    conditions: Conditions,
    wake: Callable[[], None],
) -> None:
    """Run the task for a worker's life.

    Args:
        core: Has the sources of pages, unless there are none: then the task ends at once.
        call: Calls the worker.
        conditions: Notified after each plan, and when there is none to make.
        wake: Called when a sequence may find its pages on the host.

    Raises:
        WorkerLost: The worker was lost.
    """
    if core.memory.fetched is None:
        return
    transfers = _Transfers(core, call, conditions, wake)
    async with trio.open_nursery() as nursery:
        if core.memory.disk is not None:
            nursery.start_soon(transfers.write_all)
        with contextlib.ExitStack() as stack:
            if core.feeds.siblings is not None:
                is_far = core.limits.is_far
                sibling = Sibling(lambda: core.memory, call, wake, nursery.start_soon, is_far)
                stack.enter_context(core.feeds.siblings.joined(sibling))
                nursery.start_soon(transfers.fetch_all, True)
            await transfers.fetch_all()
