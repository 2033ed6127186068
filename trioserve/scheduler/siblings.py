"""The workers of an engine, which lend each other pages of their prefix caches.

A worker that lacks pages that a sibling has may fetch them
(:mod:`~trioserve.scheduler.fetched_pages`). The sibling holds them meanwhile
(:mod:`~trioserve.scheduler.page_lending`). There are two ways of transfer: memory that both share,
where both are processes of this host; else the links of both workers, some pages at a time.

If either worker is lost, or its cache is reset, the transfer ends without pages, and they are
computed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs
import trio

from trioserve.protocol.errors import CallFailed, WorkerLost
from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.fetched_pages import NO_PLAN, FetchedPages, FetchPace, Found, Missing
from trioserve.scheduler.page_lending import Lending
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import FLUSHED, Namespace, Node
from trioserve.scheduler.step_time import StepTimeModel

_OVER_A_LINK = 8
"""Pages that go over a link in one message."""
_IN_MEMORY = 64
"""Pages that are written to shared memory before the other worker reads them."""


class LendingMemory(Protocol):
    """The memory of a worker, from its start or reset to its end or next reset."""

    @property
    def prefix(self) -> PrefixCache:
        """Its prefix cache."""
        ...

    @property
    def lending(self) -> Lending:
        """Pages of it that are lent."""
        ...

    @property
    def fetched(self) -> FetchedPages | None:
        """The fetching of pages for it."""
        ...


@attrs.define(eq=False)
class _Export:
    """Pages that a worker writes for another one."""

    nodes: Sequence[Node]
    keys: Sequence[bytes]
    in_memory: bool
    """True for shared memory, False for a message."""
    memory: str = attrs.field(init=False, default="")
    """Path of the shared memory."""
    content: bytes | None = attrs.field(init=False, default=None)
    """The message; None if the pages can't be written."""
    is_over: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when they are written, or won't be."""
    is_released: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when the memory isn't needed any more."""

    def arguments(self) -> dict[str, object]:
        """Return where another worker finds the pages."""
        return {"memory": self.memory} if self.in_memory else {"content": self.content}


@attrs.frozen(eq=False)
class Sibling:
    """A worker that is attached."""

    memory: Callable[[], LendingMemory]
    call: WorkerCall
    wake: Callable[[], None]
    """Called when pages that it has lent are free again, and when there are some to fetch."""
    start_soon: Callable[..., None]
    """Starts a task that ends with the worker."""
    is_far: bool = False
    """True if it is on another host."""

    async def write(
        self, export: _Export, make_memory: Callable[[], contextlib.AbstractContextManager[str]]
    ) -> None:
        """Have pages written, as far as they are still there, and keep the memory meanwhile.

        This is a task of the worker that lends them. It must hold them until it has answered, even
        if the other worker is lost: what it still writes would be another page.
        """
        try:
            with contextlib.ExitStack() as stack:
                arguments: dict[str, object] = {}
                if export.in_memory:
                    export.memory = stack.enter_context(make_memory())
                    arguments["memory"] = export.memory
                export.content = await self._write(export, arguments)
                export.is_over.set()
                await export.is_released.wait()
        finally:
            export.is_over.set()

    async def _write(self, export: _Export, arguments: dict[str, object]) -> bytes | None:
        memory = self.memory()
        lent = memory.lending.begin(export.nodes)
        keys = export.keys[: len(lent.pages)]
        arguments |= {"keys": keys, "pages": lent.pages, "plan": lent.plan}
        try:
            found = await self.call("export_pages", arguments)
        except (CallFailed, WorkerLost):
            return None
        finally:
            memory.lending.end(lent)
            self.wake()
        # After a failed plan some of them weren't computed.
        is_whole = self.memory() is memory and isinstance(found, bytes)
        return found if is_whole else None


@attrs.define(eq=False)
class Siblings:
    """The workers of an engine that are attached.

    Args:
        make_memory: Makes memory that workers share, for a block; returns its path.
    """

    make_memory: Callable[[], contextlib.AbstractContextManager[str]]
    pace: FetchPace = attrs.field(init=False, factory=FetchPace)
    present: list[Sibling] = attrs.field(init=False, factory=list)
    """The workers, in the order in which they came."""

    @contextlib.contextmanager
    def joined(self, sibling: Sibling) -> Iterator[None]:
        """Let the others fetch pages of ``sibling`` in the block."""
        self.present.append(sibling)
        try:
            yield
        finally:
            self.present.remove(sibling)

    def pages_for(self, prefix: PrefixCache) -> SiblingPages:
        """Return the pages of the others, for the worker of ``prefix``."""
        return SiblingPages(self, prefix)

    def send_ahead(
        self,
        memory: LendingMemory,
        namespace: Namespace,
        column: bytes,
        step_times: StepTimeModel,
    ) -> None:
        """Have the worker of ``memory`` fetch pages ahead: :meth:`FetchedPages.fetch_ahead`."""
        for sibling in self.present:
            if sibling.memory() is memory:
                fetched = memory.fetched
                if fetched is not None and fetched.fetch_ahead(namespace, column, step_times):
                    sibling.wake()

    def find(self, missing: Missing, prefix: PrefixCache) -> PageLoan | None:
        """Return the longest run of pages that a sibling has, but for the worker of ``prefix``.

        It begins with the first missing page; None if none has that.
        """
        first, best = len(missing.match.nodes), None
        if FLUSHED in missing.namespace:
            return None
        most = len(missing.column) // TOKEN_BYTES
        for sibling in self.present:
            other = sibling.memory().prefix
            if other is prefix:
                continue
            match = other.match(missing.namespace, missing.column, NO_PLAN, most)
            nodes = match.nodes[first:]
            if nodes and (best is None or len(nodes) > len(best.nodes)):
                best = PageLoan(self, sibling, nodes)
        return best


@attrs.frozen(eq=False)
class PageLoan:
    """Pages of a sibling that another worker needs."""

    _siblings: Siblings
    _sibling: Sibling
    nodes: Sequence[Node]

    async def fetch(
        self, keys: Sequence[bytes], places: Sequence[int], call: WorkerCall, *, is_far: bool
    ) -> int:
        """Have the first pages, whose keys are ``keys``, copied to ``places`` of another worker.

        They go in parts: the next one is written while that worker reads one.

        Args:
            keys: Keys of the pages.
            places: Places in that worker's memory of the host.
            call: Calls that worker; returns None if it can't take them.
            is_far: True if it is on another host.

        Returns:
            The number of pages that came, up to the first that isn't there.

        Raises:
            WorkerLost: That worker was lost.
        """
        in_memory = not (is_far or self._sibling.is_far)
        size = _IN_MEMORY if in_memory else _OVER_A_LINK
        parts = [slice(first, first + size) for first in range(0, len(keys), size)]
        num_fetched = 0
        exports = deque([self._export(keys, parts[0], in_memory)])
        try:
            for part, following in itertools.zip_longest(parts, parts[1:]):
                export = exports[0]
                await export.is_over.wait()
                if export.content is None:
                    break
                if following is not None:
                    exports.append(self._export(keys, following, in_memory))
                arguments = {"keys": keys[part], "places": places[part], **export.arguments()}
                count = _number(await call("import_pages", arguments), keys[part])
                num_fetched += count
                if count < len(keys[part]):
                    break
                exports.popleft().is_released.set()
        finally:
            for export in exports:
                export.is_released.set()
        return num_fetched

    def _export(self, keys: Sequence[bytes], part: slice, in_memory: bool) -> _Export:
        """Have the sibling write a part of the pages."""
        export = _Export(self.nodes[part], keys[part], in_memory)
        if self._sibling in self._siblings.present:
            self._sibling.start_soon(self._sibling.write, export, self._siblings.make_memory)
        else:  # It was lost or removed meanwhile.
            export.is_over.set()
        return export


def _number(found: object, keys: Sequence[bytes]) -> int:
    return found if isinstance(found, int) and 0 <= found <= len(keys) else 0


@attrs.define(eq=False)
class SiblingPages:
    """The pages of a worker's siblings as a source."""

    _siblings: Siblings
    _prefix: PrefixCache

    @property
    def pace(self) -> FetchPace:
        """Times of transfers, which all workers learn."""
        return self._siblings.pace

    def find(self, missing: Missing) -> Found | None:
        """See :meth:`trioserve.scheduler.fetched_pages.PageSource.find`."""
        loan = self._siblings.find(missing, self._prefix)
        if loan is None:
            return None
        pages = [page for _, page in zip(loan.nodes, missing.pages(), strict=False)]
        keys, tokens = zip(*pages, strict=True)
        return Found(source=self, keys=keys, tokens=tokens, loan=loan)

    def forget(self, key: bytes) -> None:
        """Do nothing: the caches are looked up each time."""
