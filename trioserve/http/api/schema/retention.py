"""TensorRT-LLM's ``kv_cache_retention_config``: priorities of a request's KV, over HTTP."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema.reading import Count, about
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.retention import MAX_PRIORITY, MAX_RANGES, Retention, RetentionRange

_FIELD = "kv_cache_retention_config"
_KvPriority = Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)]


class TokenRangeRetentionConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Range of the prompt's tokens, and the priority of their KV."""

    token_start: Annotated[Count, about("The first token's position, from 0.")] = 0
    token_end: Annotated[
        Count | None, about("The position after the last one; the prompt's end by default.")
    ] = None
    priority: Annotated[
        _KvPriority, about("From 0, which is evicted first, to 100; 35 is the default.")
    ]
    duration_ms: Annotated[
        Count | None,
        about("Milliseconds after which the priority is the default again; no end by default."),
    ] = None


class KvCacheRetentionConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Priorities of a request's KV in the prefix cache, once the request has ended."""

    token_range_retention_configs: Annotated[
        Annotated[list[TokenRangeRetentionConfig], msgspec.Meta(max_length=MAX_RANGES)],
        about("Ranges of the prompt, in order; they may not overlap."),
    ] = []
    decode_retention_priority: Annotated[
        _KvPriority | None, about("Priority of the output; the default priority if it isn't given.")
    ] = None
    decode_duration_ms: Annotated[
        Count | None, about("Milliseconds for which the output's priority holds.")
    ] = None


def retention_of(config: KvCacheRetentionConfig | None) -> Retention | None:
    """Return the retention that the field asks for.

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
