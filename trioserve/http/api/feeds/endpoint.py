"""Handlers of ``/iteration_stats`` and ``/kv_cache_events``.

Both give the events since the last request. The first request starts the collection and gets
nothing; nothing is collected before it. ``GET /kv_cache_events`` is a stream for each reader.
"""

from __future__ import annotations

import datetime

import quart
import trio

from trioserve.http.api.feeds.cache_stream import CacheStream
from trioserve.http.api.feeds.schemas import (
    BatchStats,
    CacheCleared,
    CacheRemoved,
    CacheStored,
    CacheUpdated,
    IterationStats,
    KvCacheEvent,
    KvCacheStats,
    LevelChange,
    StoredBlock,
)
from trioserve.http.api.service import Service, json_response
from trioserve.http.api.sse import stream_response
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration


class FeedEndpoints:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def iteration_stats(self) -> quart.Response:
        """Handle ``GET /iteration_stats``: at most the newest 1,000 steps since the last call."""
        engine = self._service.engine
        clock = datetime.datetime.now(datetime.UTC) - datetime.timedelta(
            seconds=trio.current_time()
        )
        return json_response(
            [
                _stats(
                    each,
                    clock + datetime.timedelta(seconds=each.time),
                    engine.ready.page_size,
                    engine.ready.max_num_seqs,
                )
                for each in await self._service.server_api.iterations()
            ]
        )

    async def kv_cache_events(self) -> quart.Response:
        """Handle ``POST /kv_cache_events``: at most the newest 1,000 since the last call."""
        return json_response(
            [_event(each) for each in await self._service.server_api.cache_events()]
        )

    async def kv_cache_stream(self) -> quart.Response:
        """Handle ``GET /kv_cache_events``: the caches' pages, and what changes, until it is left.

        A HEAD gets the headers only, because the body would never end.
        """
        stream = stream_response(CacheStream(self._service))
        is_get = quart.request.method == "GET"
        return stream if is_get else quart.Response(b"", headers=stream.headers)


def _event(event: CacheEvent) -> KvCacheEvent:
    data: CacheStored | CacheUpdated | CacheRemoved | CacheCleared
    match event.kind:
        case "stored":
            block = StoredBlock(block_hash=event.hash, num_tokens=event.num_tokens)
            data = CacheStored(parent_hash=event.parent_hash, blocks=[block])
        case "moved":
            change = LevelChange(new_value=event.cache_level, old_value=1 - event.cache_level)
            data = CacheUpdated(block_hash=event.hash, cache_level=change)
        case "removed":
            data = CacheRemoved(block_hashes=[event.hash])
        case "cleared":
            data = CacheCleared()
    return KvCacheEvent(event_id=event.number, data=data)


def _stats(
    iteration: Iteration, time: datetime.datetime, page_size: int, max_num_seqs: int
) -> IterationStats:
    return IterationStats(
        iter=iteration.number,
        timestamp=time.strftime("%m-%d-%Y %H:%M:%S.%f"),
        iter_latency_ms=iteration.step_us / 1000,
        idle_latency_ms=iteration.idle_us / 1000,
        num_active_requests=iteration.num_running,
        num_queued_requests=iteration.num_waiting,
        num_completed_requests=iteration.num_finished,
        max_num_active_requests=max_num_seqs,
        inflight_batching_stats=BatchStats(
            num_scheduled_requests=iteration.num_sequences,
            num_context_requests=iteration.num_prefills,
            num_gen_requests=iteration.num_sequences - iteration.num_prefills,
            num_paused_requests=iteration.num_preempted,
            num_ctx_tokens=iteration.num_prefill_tokens,
            num_gen_tokens=iteration.num_decode_tokens,
        ),
        kv_cache_stats=KvCacheStats(
            max_num_blocks=iteration.pages_total,
            free_num_blocks=iteration.pages_free + iteration.pages_cached,
            used_num_blocks=iteration.pages_held,
            cached_num_blocks=iteration.pages_cached,
            evicted_blocks=iteration.pages_evicted,
            offloaded_blocks=iteration.pages_offloaded,
            onloaded_blocks=iteration.pages_onloaded,
            host_max_num_blocks=iteration.host_pages_total,
            host_used_num_blocks=iteration.host_pages_cached,
            tokens_per_block=page_size,
            cache_hit_rate=iteration.prefix_cache_hits / max(iteration.prefix_cache_queries, 1),
        ),
    )
