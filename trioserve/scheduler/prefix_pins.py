"""Pins that keep the cached prefix of some tokens for a later request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.sequence_state import namespace_of


@attrs.define(eq=False)
class PrefixPins:
    """The pins on prefix caches: see :mod:`~trioserve.scheduler.page_priorities`.

    A pin holds in every cache, for the pages that are there. It ends with them: when the cache is
    cleared, and with the worker.

    Args:
        cores: Returns the cores of the schedulers that have one.
        virtual_ids: Returns the ids that come before those of a prompt with that adapter.
    """

    _cores: Callable[[], Iterable[SchedulerCore]]
    _virtual_ids: Callable[[int], list[int]] = attrs.field(default=lambda adapter: [])

    def pin(
        self, name: str, tokens: Sequence[int], priority: int, *, salt: str, adapter: int
    ) -> None:
        """Keep the cached pages of ``tokens`` at ``priority`` at least, until :meth:`unpin`.

        An earlier pin of the same name ends.
        """
        ids = [*self._virtual_ids(adapter), *tokens]
        for core in self._cores():
            if core.limits.enable_prefix_caching:
                core.memory.pin(name, namespace_of(salt, adapter), ids, priority)

    def unpin(self, name: str) -> None:
        """Remove the pin of that name, if there is one."""
        for core in self._cores():
            core.memory.unpin(name)

    def names(self) -> set[str]:
        """Return the names of all pins."""
        pinned = (core.memory.prefix.priorities.pin_names() for core in self._cores())
        return set().union(*pinned)
