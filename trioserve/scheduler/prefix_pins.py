"""Pins that keep the cached prefix of some tokens for a later request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.sequence_state import namespace_of


@attrs.define(eq=False)
class PrefixPins:
    """The pins on one scheduler's prefix cache: see :mod:`~trioserve.scheduler.page_priorities`.

    A pin ends with the pages that it protects: when the cache is cleared, and with the worker.

    Args:
        core: Returns the scheduler's core; None before there is one.
    """

    _core: Callable[[], SchedulerCore | None]

    def pin(
        self, name: str, tokens: Sequence[int], priority: int, *, salt: str, adapter: int
    ) -> None:
        """Keep the cached pages of ``tokens`` at ``priority`` at least, until :meth:`unpin`.

        An earlier pin of the same name ends.
        """
        core = self._core()
        if core is not None and core.limits.enable_prefix_caching:
            core.memory.pin(name, namespace_of(salt, adapter), tokens, priority)

    def unpin(self, name: str) -> None:
        """Remove the pin of that name, if there is one."""
        core = self._core()
        if core is not None:
            core.memory.unpin(name)

    def names(self) -> set[str]:
        """Return the names of all pins."""
        core = self._core()
        return set() if core is None else core.memory.prefix.priorities.pin_names()
