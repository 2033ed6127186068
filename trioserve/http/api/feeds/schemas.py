"""Answers of the feeds, as classes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema.reading import about


class BatchStats(msgspec.Struct, kw_only=True, rename="camel"):
    """Work of one step. A request is counted once for each of its outputs."""

    num_scheduled_requests: Annotated[int, about("Requests that the step computed.")]
    num_context_requests: Annotated[int, about("Requests in prefill.")]
    num_gen_requests: Annotated[int, about("Requests in decode, which got a token each.")]
    num_paused_requests: Annotated[int, about("Requests preempted since the step before.")]
    num_ctx_tokens: Annotated[int, about("Tokens of prompts that the step computed.")]
    num_gen_tokens: Annotated[int, about("The other tokens that it computed.")]


class KvCacheStats(msgspec.Struct, kw_only=True, rename="camel"):
    """The KV cache's pages after a step."""

    max_num_blocks: Annotated[int, about("All pages.")]
    free_num_blocks: Annotated[int, about("Pages that can be allocated: empty or only cached.")]
    used_num_blocks: Annotated[int, about("Pages that running requests hold.")]
    cached_num_blocks: Annotated[
        int, about("Pages among `freeNumBlocks` that are kept for their content.")
    ]
    evicted_blocks: Annotated[int, about("Cached pages evicted since the step before.")]
    offloaded_blocks: Annotated[
        int, about("Cached pages moved to the host's memory since the step before.")
    ]
    onloaded_blocks: Annotated[int, about("Cached pages moved back since the step before.")]
    host_max_num_blocks: Annotated[int, about("All pages of the host's memory.")]
    host_used_num_blocks: Annotated[int, about("Pages in use of the host's memory.")]
    tokens_per_block: Annotated[int, about("Tokens of a page.")]
    cache_hit_rate: Annotated[
        float,
        about(
            "Part of all requests' prompt tokens that was found in the cache; 0 if there were none."
        ),
    ]


class IterationStats(msgspec.Struct, kw_only=True):
    """One step, in TensorRT-LLM's form."""

    iter: Annotated[int, about("The number of the step since the server began.")]
    timestamp: Annotated[str, about("Time of its result, in UTC: `11-22-2026 15:04:05.123456`.")]
    iter_latency_ms: Annotated[
        float, msgspec.Meta(description="Milliseconds that the worker spent in it.")
    ] = msgspec.field(name="iterLatencyMS")
    idle_latency_ms: Annotated[
        float,
        msgspec.Meta(
            description="Milliseconds that the worker was idle before it, with work queued."
        ),
    ] = msgspec.field(name="idleLatencyMS")
    num_active_requests: Annotated[int, about("Requests that run now.")] = msgspec.field(
        name="numActiveRequests"
    )
    num_queued_requests: Annotated[int, about("Requests that wait.")] = msgspec.field(
        name="numQueuedRequests"
    )
    num_completed_requests: Annotated[int, about("Requests of the step that ended with it.")] = (
        msgspec.field(name="numCompletedRequests")
    )
    max_num_active_requests: Annotated[int, about("Most requests that may run at a time.")] = (
        msgspec.field(name="maxNumActiveRequests")
    )
    inflight_batching_stats: Annotated[BatchStats, about("The work of the step.")] = msgspec.field(
        name="inflightBatchingStats"
    )
    kv_cache_stats: Annotated[KvCacheStats, about("The KV cache after it.")] = msgspec.field(
        name="kvCacheStats"
    )


class StoredBlock(msgspec.Struct, kw_only=True):
    """A page that was stored in the prefix cache."""

    type: Annotated[str, about("Always `stored_block`.")] = "stored_block"
    block_hash: Annotated[int, about("Hash of all tokens up to the page's end.")]
    num_tokens: Annotated[int, about("Tokens of the page.")]
    cache_level: Annotated[int, about("Always 0: the worker's memory.")] = 0


class CacheStored(msgspec.Struct, kw_only=True, tag_field="type", tag="stored"):
    """Event: a page was stored."""

    parent_hash: Annotated[
        int | None, about("The hash of the page before it; null for a prompt's first one.")
    ]
    blocks: Annotated[list[StoredBlock], about("The page.")]


class LevelChange(msgspec.Struct, kw_only=True):
    """A page's level before and after: 0 is the worker's memory, 1 the host's."""

    type: Annotated[str, about("Always `event_diff`.")] = "event_diff"
    new_value: Annotated[int, about("The level after.")]
    old_value: Annotated[int, about("The level before.")]


class CacheUpdated(msgspec.Struct, kw_only=True, tag_field="type", tag="updated"):
    """Event: a page moved to the host's memory, or back."""

    block_hash: Annotated[int, about("Its hash.")]
    cache_level: Annotated[LevelChange, about("The levels before and after.")]


class CacheRemoved(msgspec.Struct, kw_only=True, tag_field="type", tag="removed"):
    """Event: a page was removed."""

    block_hashes: Annotated[list[int], about("Its hash.")]


class CacheCleared(msgspec.Struct, kw_only=True, tag_field="type", tag="cleared"):
    """Event: all earlier pages were removed."""


class KvCacheEvent(msgspec.Struct, kw_only=True):
    """An event of the prefix cache."""

    event_id: Annotated[int, about("Counts up by one; a gap means lost events.")]
    data: Annotated[CacheStored | CacheUpdated | CacheRemoved | CacheCleared, about("The event.")]
