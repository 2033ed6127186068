"""The workers of one host, which lend each other pages of their prefix caches.

A worker that lacks pages that a sibling has may fetch them
(:mod:`~trioserve.scheduler.fetched_pages`). The sibling writes them to memory that both share, and
the worker reads them from there. The sibling holds them meanwhile
(:mod:`~trioserve.scheduler.page_lending`).

If either worker is lost, or its cache is reset, the transfer ends without pages, and they are
computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

import attrs

from trioserve.protocol.errors import CallFailed, WorkerLost
from trioserve.protocol.wire import TOKEN_BYTES
from trioserve.scheduler.calls import WorkerCall
from trioserve.scheduler.fetched_pages import FetchPace, Found, Missing
from trioserve.scheduler.page_lending import Lending
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.prefix_tree import FLUSHED, Node

_NO_PLAN = -1


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


@attrs.frozen(eq=False)
class Sibling:
    """A worker that is attached."""

    memory: Callable[[], LendingMemory]
    call: WorkerCall
    wake: Callable[[], None]
    """Called when pages that it has lent are free again."""


@attrs.define(eq=False)
class Siblings:
    """The workers of one host that are attached.

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
            match = other.match(missing.namespace, missing.column, _NO_PLAN, most)
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

    @contextlib.asynccontextmanager
    async def exported(self, keys: Sequence[bytes]) -> AsyncIterator[str | None]:
        """Have the sibling write the pages of ``keys``, which are the first ones, for the block.

        The result is the path of the memory that has them, as far as they are still there; None if
        the sibling can't.
        """
        with self._siblings.make_memory() as path:
            yield path if await self._export(path, keys) else None

    async def _export(self, path: str, keys: Sequence[bytes]) -> bool:
        if self._sibling not in self._siblings.present:  # It was lost or removed meanwhile.
            return False
        memory = self._sibling.memory()
        lent = memory.lending.begin(self.nodes[: len(keys)])
        arguments = {"memory": path, "keys": keys[: len(lent.pages)], "pages": lent.pages}
        try:
            await self._sibling.call("export_pages", arguments)
        except (CallFailed, WorkerLost):
            return False
        finally:
            memory.lending.end(lent)
            self._sibling.wake()
        # After a failed plan some of them weren't computed.
        return self._sibling.memory() is memory


@attrs.define(eq=False)
class SiblingPages:
    """The pages of a worker's siblings as a source."""

    _siblings: Siblings
    _prefix: PrefixCache

    @property
    def pace(self) -> FetchPace:
        """Times of transfers, which all workers of the host learn."""
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
