"""TensorRT-LLM's ``kv_cache_retention_config``: how much a request's KV is worth, over HTTP."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema.reading import Count, about
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.retention import MAX_PRIORITY, MAX_RANGES, Retention, RetentionRange

_FIELD = "kv_cache_retention_config"
_KvPriority = Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)]


class TokenRangeRetentionConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Tokens of the prompt, and how much their KV is worth."""

    token_start: Annotated[Count, about("The first token's position, from 0.")] = 0
    token_end: Annotated[
        Count | None, about("The position after the last one; the prompt's end if it isn't given.")
    ] = None
    priority: Annotated[_KvPriority, about("0, which is given away first, to 100; 35 is usual.")]
    duration_ms: Annotated[
        Count | None,
        about("Milliseconds after which the priority is the usual one again; no end if not given."),
    ] = None


class KvCacheRetentionConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How much a request's KV is worth in the prefix cache, once the request has ended."""

    token_range_retention_configs: Annotated[
        Annotated[list[TokenRangeRetentionConfig], msgspec.Meta(max_length=MAX_RANGES)],
        about("Parts of the prompt, in order; they may not overlap."),
    ] = []
    decode_retention_priority: Annotated[
        _KvPriority | None, about("Of the output; if it isn't given, nothing is said of it.")
    ] = None
    decode_duration_ms: Annotated[
        Count | None, about("Milliseconds that the output's priority is for.")
    ] = None


def retention_of(config: KvCacheRetentionConfig | None) -> Retention | None:
    """What the field asks for.

    Raises:
        InvalidRequest: ranges are empty, overlap, or aren't in order; ``param`` names the field.
    """
    if config is None:
        return None
    if config.decode_duration_ms is not None and config.decode_retention_priority is None:
        name = f"{_FIELD}.decode_duration_ms"
        raise InvalidRequest(f"{name} needs decode_retention_priority", param=name)
    ranges: list[RetentionRange] = []
    stop: int | None = 0
    for index, each in enumerate(config.token_range_retention_configs):
        name = f"{_FIELD}.token_range_retention_configs[{index}]"
        if stop is None or each.token_start < stop:
            before = "the prompt's end" if stop is None else stop
            raise InvalidRequest(
                f"{name}.token_start must not be before the end of the range before it "
                f"({before}), got {each.token_start}",
                param=f"{name}.token_start",
            )
        stop = each.token_end
        if stop is not None and stop <= each.token_start:
            raise InvalidRequest(
                f"{name}.token_end must be above token_start ({each.token_start}), got {stop}",
                param=f"{name}.token_end",
            )
        ranges.append(RetentionRange(each.token_start, stop, each.priority, each.duration_ms))
    return Retention(ranges, config.decode_retention_priority, config.decode_duration_ms)
