"""Retention of a request's KV in the prefix cache.

Unused pages of the KV cache are evicted by priority, the lowest first. Among pages of one priority,
the least recently used goes first. A priority may be for a time only; then it is the usual one
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from trioserve.protocol.errors import InvalidRequest

DEFAULT_PRIORITY = 35
"""Priority of a page for which no request names one."""
MAX_PRIORITY = 100
MAX_RANGES = 256
"""Ranges of one prompt."""


def _check_priority(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PRIORITY:
        raise InvalidRequest(
            f"{attribute.name} must be an integer from 0 to {MAX_PRIORITY}, got {value!r}",
            param=f"retention.{attribute.name}",
        )


def _check_number(_: object, attribute: attrs.Attribute[Any], value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidRequest(
            f"{attribute.name} must be an integer that isn't negative, got {value!r}",
            param=f"retention.{attribute.name}",
        )


@attrs.frozen
class RetentionRange:
    """A range of a prompt's tokens, and the priority of their KV.

    Args:
        start: the first token's position, from 0.
        end: the position after the last one; None for the prompt's end.
        priority: 0 (evicted first) to 100; 35 is usual.
        duration_ms: milliseconds from the release of the request's pages, after which the priority
            is the usual one again; None for no end.

    Raises:
        InvalidRequest: a value is out of its range.
    """

    start: int = attrs.field(validator=_check_number)
    end: int | None = attrs.field(validator=attrs.validators.optional(_check_number))
    priority: int = attrs.field(validator=_check_priority)
    duration_ms: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_check_number)
    )

    def __attrs_post_init__(self) -> None:
        if self.end is not None and self.end <= self.start:
            raise InvalidRequest(
                f"end must be above start ({self.start}), got {self.end}", param="retention.end"
            )


def _as_ranges(ranges: Iterable[RetentionRange]) -> tuple[RetentionRange, ...]:
    return tuple(ranges)


def _check_ranges(_: object, __: object, ranges: tuple[RetentionRange, ...]) -> None:
    if len(ranges) > MAX_RANGES:
        raise InvalidRequest(
            f"ranges has {len(ranges)} entries; at most {MAX_RANGES} are served",
            param="retention.ranges",
        )
    stop: int | None = 0
    for each in ranges:
        if not isinstance(each, RetentionRange):
            raise InvalidRequest(
                f"ranges holds RetentionRange, got {each!r}", param="retention.ranges"
            )
        if stop is None or each.start < stop:
            raise InvalidRequest(
                "ranges must be in order and not overlap", param="retention.ranges"
            )
        stop = each.end


@attrs.frozen
class Retention:
    """The priorities of a request's pages once it has ended. Other pages keep theirs.

    The first token of a page decides its priority. No page is kept for certain: a priority only
    orders evictions. A page is kept at least as long as the pages that continue it.

    Args:
        ranges: parts of the prompt, in order, that don't overlap.
        output_priority: priority of the output's pages; None to leave it as it is.
        output_duration_ms: its duration, as in :class:`RetentionRange`.

    Raises:
        InvalidRequest: a value is out of its range; ``param`` names it.
    """

    ranges: tuple[RetentionRange, ...] = attrs.field(
        default=(), converter=_as_ranges, validator=_check_ranges
    )
    output_priority: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_check_priority)
    )
    output_duration_ms: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(_check_number)
    )

    def behind(self, num_tokens: int) -> Retention:
        """Return the same for a prompt with so many more tokens in front of it."""
        ranges = [
            attrs.evolve(
                each,
                start=each.start + num_tokens,
                end=None if each.end is None else each.end + num_tokens,
            )
            for each in self.ranges
        ]
        return attrs.evolve(self, ranges=ranges)

    def of_pages(
        self, page_size: int, prompt_length: int, num_pages: int
    ) -> list[tuple[int, float] | None]:
        """Return priority and seconds of each page, infinity for no end; None to leave it."""
        found: list[tuple[int, float] | None] = [None] * num_pages
        for each in self.ranges:
            end = prompt_length if each.end is None else min(each.end, prompt_length)
            first, last = -(-each.start // page_size), -(-end // page_size)
            for index in range(first, min(last, num_pages)):
                found[index] = each.priority, _seconds(each.duration_ms)
        if self.output_priority is not None:
            for index in range(-(-prompt_length // page_size), num_pages):
                found[index] = self.output_priority, _seconds(self.output_duration_ms)
        return found


def _seconds(duration_ms: int | None) -> float:
    return float("inf") if duration_ms is None else duration_ms / 1000
