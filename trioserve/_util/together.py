"""Concurrent calls of one function for several items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import trio

from trioserve._util.exception_groups import sole_exception

Item = TypeVar("Item")
Result = TypeVar("Result")


async def all_together(
    function: Callable[[int, Item], Awaitable[Result]], items: Iterable[Item]
) -> list[Result]:
    """Return the results of ``function`` for each index and item, in order.

    Raises:
        Exception: The first failure; the other calls are then cancelled.
    """
    found: dict[int, Result] = {}

    async def run(index: int, item: Item) -> None:
        found[index] = await function(index, item)

    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            for index, item in enumerate(items):
                nursery.start_soon(run, index, item)
    except BaseExceptionGroup as group:
        failure = sole_exception(group)
    if failure is not None:
        raise failure
    return [found[index] for index in range(len(found))]
