"""Answers of the endpoints that tell what has happened since they were asked last."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema.reading import about


class BatchStats(msgspec.Struct, kw_only=True, rename="camel"):
    """What a step computed. A request is counted once for each of its outputs."""

    num_scheduled_requests: Annotated[int, about("Requests that the step computed.")]
    num_context_requests: Annotated[int, about("Those of them that were at their prompt.")]
    num_gen_requests: Annotated[int, about("The others, which got a token each.")]
    num_paused_requests: Annotated[
        int, about("Requests that had to give up their pages since the step before.")
    ]
    num_ctx_tokens: Annotated[int, about("Tokens of prompts that the step computed.")]
    num_gen_tokens: Annotated[int, about("The other tokens that it computed.")]


class KvCacheStats(msgspec.Struct, kw_only=True, rename="camel"):
    """The KV cache's pages after a step."""

    max_num_blocks: Annotated[int, about("All pages.")]
    free_num_blocks: Annotated[int, about("Pages that can be had: empty or only cached.")]
    used_num_blocks: Annotated[int, about("Pages that running requests hold.")]
    cached_num_blocks: Annotated[
        int, about("Those of `freeNumBlocks` that are kept for what they contain.")
    ]
    evicted_blocks: Annotated[int, about("Cached pages lost since the step before.")]
    offloaded_blocks: Annotated[int, about("Those that went to the host's memory since then.")]
    onloaded_blocks: Annotated[int, about("Those that came back from there.")]
    host_max_num_blocks: Annotated[int, about("All pages that the host has room for.")]
    host_used_num_blocks: Annotated[int, about("Those of them that hold something.")]
    tokens_per_block: Annotated[int, about("Tokens that a page holds.")]
    cache_hit_rate: Annotated[
        float,
        about("Of the tokens of requests that came in, the part whose KV was found; 0 of none."),
    ]


class IterationStats(msgspec.Struct, kw_only=True):
    """One step, in TensorRT-LLM's words."""

    iter: Annotated[int, about("The number of the step since the server began.")]
    timestamp: Annotated[str, about("When its result came, in UTC: `11-22-2026 15:04:05.123456`.")]
    iter_latency_ms: Annotated[
        float, msgspec.Meta(description="Milliseconds that the worker spent in it.")
    ] = msgspec.field(name="iterLatencyMS")
    idle_latency_ms: Annotated[
        float,
        msgspec.Meta(
            description="Milliseconds that the worker waited before it, with something to do."
        ),
    ] = msgspec.field(name="idleLatencyMS")
    num_active_requests: Annotated[int, about("Requests that run now.")] = msgspec.field(
        name="numActiveRequests"
    )
    num_queued_requests: Annotated[int, about("Requests that wait.")] = msgspec.field(
        name="numQueuedRequests"
    )
    num_completed_requests: Annotated[
        int, about("Requests of the step that had ended after it.")
    ] = msgspec.field(name="numCompletedRequests")
    max_num_active_requests: Annotated[int, about("Most requests that run at a time.")] = (
        msgspec.field(name="maxNumActiveRequests")
    )
    inflight_batching_stats: Annotated[BatchStats, about("What it computed.")] = msgspec.field(
        name="inflightBatchingStats"
    )
    kv_cache_stats: Annotated[KvCacheStats, about("The KV cache after it.")] = msgspec.field(
        name="kvCacheStats"
    )


class StoredBlock(msgspec.Struct, kw_only=True):
    """A page that came into the prefix cache."""

    type: Annotated[str, about("Always `stored_block`.")] = "stored_block"
    block_hash: Annotated[int, about("It stands for all tokens up to the page's end.")]
    num_tokens: Annotated[int, about("Tokens that the page holds.")]
    cache_level: Annotated[int, about("Always 0: the worker's memory.")] = 0


class CacheStored(msgspec.Struct, kw_only=True, tag_field="type", tag="stored"):
    """A page came in."""

    parent_hash: Annotated[
        int | None, about("The hash of the page before it; null for a prompt's first one.")
    ]
    blocks: Annotated[list[StoredBlock], about("The page.")]


class LevelChange(msgspec.Struct, kw_only=True):
    """Where a page was, and where it is: 0 in the worker's memory, 1 in the host's."""

    type: Annotated[str, about("Always `event_diff`.")] = "event_diff"
    new_value: Annotated[int, about("Where it is.")]
    old_value: Annotated[int, about("Where it was.")]


class CacheUpdated(msgspec.Struct, kw_only=True, tag_field="type", tag="updated"):
    """A page went to the host's memory, or came back."""

    block_hash: Annotated[int, about("Its hash.")]
    cache_level: Annotated[LevelChange, about("From where to where.")]


class CacheRemoved(msgspec.Struct, kw_only=True, tag_field="type", tag="removed"):
    """A page went out."""

    block_hashes: Annotated[list[int], about("Its hash.")]


class CacheCleared(msgspec.Struct, kw_only=True, tag_field="type", tag="cleared"):
    """Nothing is found any more of what came in before."""


class KvCacheEvent(msgspec.Struct, kw_only=True):
    """Something that happened to the prefix cache."""

    event_id: Annotated[int, about("Counts up by one; a gap tells of events that were lost.")]
    data: Annotated[CacheStored | CacheUpdated | CacheRemoved | CacheCleared, about("What it was.")]
