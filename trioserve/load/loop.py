"""A closed loop: a fixed number of streams, each of which asks again as soon as it is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from trioserve.load.client import Client, Record, Target

__all__ = ["Run", "closed_loop"]


@attrs.frozen(kw_only=True)
class Run:
    """One record per request, in the order of the requests, and the seconds that all took."""

    concurrency: int
    records: list[Record]
    duration: float


async def closed_loop(
    target: Target, requests: Sequence[Mapping[str, Any]], concurrency: int
) -> Run:
    """Send ``requests`` over ``concurrency`` streams until all are answered.

    Each request is a map of the fields of its body that differ from the target's.

    Raises:
        ValueError: no requests, or a concurrency below 1.
    """
    if not requests or concurrency < 1:
        raise ValueError("a closed loop needs requests and a concurrency of at least 1")
    records: dict[int, Record] = {}
    queue = iter(enumerate(requests))
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(min(concurrency, len(requests))):
            nursery.start_soon(_one_stream, target, queue, records)
    duration = trio.current_time() - started
    ordered = [records[index] for index in range(len(requests))]
    return Run(concurrency=concurrency, records=ordered, duration=duration)


async def _one_stream(
    target: Target, queue: Iterator[tuple[int, Mapping[str, Any]]], records: dict[int, Record]
) -> None:
    async with Client(target) as client:
        for index, request in queue:
            records[index] = await client.send(request)
