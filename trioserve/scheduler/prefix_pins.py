"""Keeping what is cached of some tokens, for whoever will go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from trioserve.scheduler.core import SchedulerCore
from trioserve.scheduler.sequence_state import namespace_of


@attrs.define(eq=False)
class PrefixPins:
    """The holds on one scheduler's prefix cache: see :mod:`~trioserve.scheduler.page_priorities`.

    A hold ends by itself with the pages that it is on: when the cache is emptied, and with the
    worker.

    Args:
        core: gives the scheduler's core, None before there is one.
    """

    _core: Callable[[], SchedulerCore | None]

    def hold(
        self, name: str, tokens: Sequence[int], priority: int, *, salt: str, adapter: int
    ) -> None:
        """Have what is cached of ``tokens`` worth ``priority`` at least, until :meth:`unpin`.

        There is one hold of each name: a former one ends.
        """
        core = self._core()
        if core is not None and core.limits.enable_prefix_caching:
            core.memory.hold(name, namespace_of(salt, adapter), tokens, priority)

    def unpin(self, name: str) -> None:
        """End the hold of that name, if there is one."""
        core = self._core()
        if core is not None:
            core.memory.unpin(name)

    def names(self) -> set[str]:
        """Those of the holds that there are."""
        core = self._core()
        return set() if core is None else core.memory.prefix.priorities.hold_names()
