"""The routes of what has happened."""

from __future__ import annotations

from trioserve.http.api.feeds.schemas import IterationStats, KvCacheEvent
from trioserve.http.api.route import Route

ROUTES = (
    Route(
        method="GET",
        rule="/iteration_stats",
        handler="iteration_stats",
        summary="What each step did since this was asked last; the first time nothing",
        group="The server",
        peers="TensorRT-LLM",
        response=list[IterationStats],
    ),
    Route(
        method="POST",
        rule="/kv_cache_events",
        handler="kv_cache_events",
        summary="What came into the prefix cache or went out since this was asked last",
        group="The server",
        peers="TensorRT-LLM",
        response=list[KvCacheEvent],
        control=True,
    ),
)
