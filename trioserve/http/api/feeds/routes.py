"""Routes of the feeds."""

from __future__ import annotations

from trioserve.http.api.feeds.schemas import IterationStats, KvCacheEvent
from trioserve.http.api.route import Route

ROUTES = (
    Route(
        method="GET",
        rule="/iteration_stats",
        handler="iteration_stats",
        summary="The steps since the last request; the first request gets none",
        group="The server",
        peers="TensorRT-LLM",
        response=list[IterationStats],
    ),
    Route(
        method="POST",
        rule="/kv_cache_events",
        handler="kv_cache_events",
        summary="Pages stored in the prefix cache or removed since the last request",
        group="The server",
        peers="TensorRT-LLM",
        response=list[KvCacheEvent],
        control=True,
    ),
    Route(
        method="GET",
        rule="/kv_cache_events",
        handler="kv_cache_stream",
        summary="All pages of the prefix caches, and then what changes, with the load of each "
        "worker, as events",
        group="The server",
        response="text/event-stream",
        errors=(429,),
        control=True,
    ),
)
