"""Definitions of the metrics of an engine's parts: cache, worker, failures and HTTP."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.observability.metrics.definition import (
    Definition,
    Samples,
    Scrape,
    counter,
    engine_counter,
    engine_gauge,
    gauge,
    histogram,
)
from trioserve.observability.worker_report import WorkerReport
from trioserve.protocol.grammar import GRAMMAR_KINDS

MEDIA_KINDS = ("image", "audio", "video")

GRAMMAR_OUTCOMES = ("ok", "refused", "timeout")

LOSS_REASONS = ("killed", "crashed", "hung", "unreachable", "failed")


def _cache_config(scrape: Scrape) -> dict[str, object]:
    config, ready = scrape.engine.config, scrape.engine.ready
    return {
        "block_size": ready.page_size,
        "cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "num_gpu_blocks": ready.num_pages,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
    }


def _by_worker(scrape: Scrape, read: Callable[[WorkerReport], float]) -> Samples:
    return [((str(each.index),), read(each)) for each in scrape.statistics.workers]


CACHE = (
    engine_gauge(
        "cache",
        "kv_cache_usage_perc",
        lambda s: s.scheduler.pages_held / max(s.scheduler.pages_total, 1),
        "Share of the KV cache's pages that requests hold, from 0 to 1",
    ),
    Definition(
        name="kv_cache_pages",
        kind="gauge",
        help="Pages by state: `held` by requests, `cached` for later prompts, or `free`",
        group="cache",
        labels=("state",),
        watching=True,
        read=lambda s: [
            (("held",), s.scheduler.pages_held),
            (("cached",), s.scheduler.pages_cached),
            (("free",), s.scheduler.pages_free),
        ],
    ),
    engine_counter(
        "cache",
        "prefix_cache_queries",
        lambda s: s.scheduler.prefix_cache_queries,
        "Tokens looked up in the prefix cache",
    ),
    engine_counter(
        "cache",
        "prefix_cache_hits",
        lambda s: s.scheduler.prefix_cache_hits,
        "Tokens found in the prefix cache",
    ),
    engine_counter(
        "cache",
        "kv_cache_evicted_pages",
        lambda s: s.scheduler.pages_evicted,
        "Cached pages that were evicted to make room",
    ),
    engine_counter(
        "cache",
        "kv_cache_offloaded_pages",
        lambda s: s.scheduler.pages_offloaded,
        "Cached pages that were copied to the host's memory",
    ),
    engine_counter(
        "cache",
        "kv_cache_onloaded_pages",
        lambda s: s.scheduler.pages_onloaded,
        "Pages that were copied back from the host's memory",
    ),
    Definition(
        name="kv_cache_host_pages",
        kind="gauge",
        help="Pages in the host's memory by state: `cached` for later prompts, or `free`",
        group="cache",
        labels=("state",),
        watching=True,
        read=lambda s: [
            (("cached",), s.scheduler.host_pages_cached),
            (("free",), s.scheduler.host_pages_total - s.scheduler.host_pages_cached),
        ],
    ),
    engine_counter(
        "cache",
        "kv_cache_written_pages",
        lambda s: s.scheduler.pages_written,
        "Pages that were written to the disk",
    ),
    engine_counter(
        "cache",
        "kv_cache_read_pages",
        lambda s: s.scheduler.pages_read,
        "Pages that were read from the disk",
    ),
    engine_counter(
        "cache",
        "kv_cache_imported_pages",
        lambda s: s.scheduler.pages_imported,
        "Pages that were taken over from other workers",
    ),
    engine_counter(
        "cache",
        "num_handed_over",
        lambda s: s.scheduler.num_handed_over,
        "Requests that moved to a worker that decodes once their prompts were computed",
    ),
    engine_gauge(
        "cache",
        "kv_cache_disk_pages",
        lambda s: s.scheduler.disk_pages,
        "Pages on disk; those that workers share count for each",
    ),
    engine_gauge("cache", "sessions", lambda s: s.statistics.num_sessions, "Open sessions"),
    Definition(
        name="cache_config_info",
        kind="gauge",
        help="1; the labels tell the KV cache's options and size",
        group="cache",
        labels=(
            *("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
            *("kv_cache_memory_bytes", "num_gpu_blocks", "num_gpu_blocks_override"),
        ),
        watching=True,
        read=lambda s: [(tuple(str(value) for value in _cache_config(s).values()), 1)],
    ),
)


WORKER = (
    engine_counter("worker", "worker_steps", lambda s: s.scheduler.num_steps, "Steps computed"),
    engine_counter(
        "worker",
        "worker_step_seconds",
        lambda s: s.scheduler.step_us / 1e6,
        "Time in which the device computed steps",
    ),
    engine_counter(
        "worker",
        "worker_idle_seconds",
        lambda s: s.scheduler.idle_us / 1e6,
        "Time in which the device was idle although there was work: between steps, and in steps "
        "while data was copied",
    ),
    engine_counter(
        "worker",
        "worker_launch_seconds",
        lambda s: s.scheduler.launch_us / 1e6,
        "Time that the worker took to queue steps on a GPU; if it is as long as the steps, the "
        "GPU waits for kernel launches",
    ),
    engine_counter(
        "worker",
        "spec_decode_num_drafts",
        lambda s: s.scheduler.num_drafts,
        "Steps of sequences that verified draft tokens",
    ),
    engine_counter(
        "worker",
        "spec_decode_num_draft_tokens",
        lambda s: s.scheduler.num_draft_tokens,
        "Draft tokens verified",
    ),
    engine_counter(
        "worker",
        "spec_decode_num_accepted_tokens",
        lambda s: s.scheduler.num_accepted_drafts,
        "Draft tokens accepted",
    ),
    Definition(
        name="spec_decode_num_accepted_tokens_per_pos",
        kind="counter",
        help="Draft tokens accepted, by their position among their row's drafts, from 0",
        group="worker",
        labels=("position",),
        watching=True,
        read=lambda s: [
            ((str(position),), count)
            for position, count in enumerate(s.scheduler.accepted_by_position)
        ],
    ),
    engine_gauge(
        "worker",
        "worker_plans_in_flight",
        lambda s: s.scheduler.plans_in_flight,
        "Steps sent to the worker that have no result yet",
    ),
    engine_counter(
        "worker",
        "worker_restarts",
        lambda s: s.statistics.worker_restarts,
        "Workers started in place of a dead one",
    ),
    Definition(
        name="worker_up",
        kind="gauge",
        help="1 while the worker of that number runs",
        group="worker",
        labels=("worker",),
        watching=True,
        read=lambda s: _by_worker(s, lambda each: each.is_up),
    ),
    Definition(
        name="worker_sequences",
        kind="gauge",
        help="Sequences that a worker computes, or that wait for a slot of it",
        group="worker",
        labels=("worker", "state"),
        watching=True,
        read=lambda s: [
            ((str(each.index), state), count)
            for each in s.statistics.workers
            for state, count in (("running", each.num_running), ("waiting", each.num_waiting))
        ],
    ),
    Definition(
        name="worker_kv_cache_usage_perc",
        kind="gauge",
        help="Share of a worker's KV cache that requests hold, from 0 to 1",
        group="worker",
        labels=("worker",),
        watching=True,
        read=lambda s: _by_worker(s, lambda each: each.kv_usage),
    ),
    Definition(
        name="worker_plan_bytes",
        kind="counter",
        help="Bytes of the plans that were sent to a worker",
        group="worker",
        labels=("worker",),
        watching=True,
        read=lambda s: _by_worker(s, lambda each: each.plan_bytes),
    ),
    Definition(
        name="worker_round_trip_seconds",
        kind="gauge",
        help="Seconds from the last heartbeat to its answer, of each worker on another host",
        group="worker",
        labels=("worker",),
        watching=True,
        read=lambda s: [
            ((str(each.index),), each.round_trip_ms / 1000)
            for each in s.statistics.workers
            if each.round_trip_ms is not None
        ],
    ),
    Definition(
        name="engine_sleep_state",
        kind="gauge",
        help="1 for the state that the engine is in: `weights_offloaded` while its memory is "
        "released; `discard_all` doesn't occur, because weights always come back by themselves",
        group="worker",
        labels=("sleep_state",),
        watching=True,
        read=lambda s: [
            (("awake",), int(not s.statistics.memory_released)),
            (("weights_offloaded",), int(s.statistics.memory_released)),
            (("discard_all",), 0),
        ],
    ),
    Definition(
        name="grammar_compilations",
        kind="counter",
        help="JSON schemas, expressions and grammars that a worker was asked to compile",
        group="worker",
        labels=("kind", "outcome"),
        read=lambda s: [
            ((kind, outcome), s.metrics.grammars[kind, outcome])
            for kind in GRAMMAR_KINDS
            for outcome in GRAMMAR_OUTCOMES
        ],
    ),
    histogram(
        "worker",
        "grammar_compilation_seconds",
        lambda s: s.metrics.grammar_seconds,
        "Time that a worker took to compile a grammar",
    ),
)

MEDIA = (
    Definition(
        name="mm_input_bytes",
        kind="counter",
        help="Bytes of images, audio clips and videos in prompts, as files or decoded pixels",
        group="media",
        labels=("kind",),
        read=lambda s: [((kind,), s.metrics.media_bytes[kind]) for kind in MEDIA_KINDS],
    ),
    counter(
        "media",
        "mm_cache_queries",
        lambda s: s.metrics.media_lookups,
        "Media whose embeddings were looked up in the cache",
    ),
    counter(
        "media",
        "mm_cache_hits",
        lambda s: s.metrics.media_hits,
        "Media whose embeddings were in the cache, or were being computed",
    ),
    histogram(
        "media",
        "mm_encode_seconds",
        lambda s: s.metrics.media_encode_seconds,
        "Time from the call for an image's embeddings to their arrival, with the wait for others",
    ),
)

RELIABILITY = (
    Definition(
        name="worker_losses",
        kind="counter",
        help="Workers lost: `killed` from outside, `crashed`, `hung` past the watchdog's time, "
        "`unreachable` on another host, or `failed`: reported a fatal error or sent an invalid "
        "message",
        group="reliability",
        labels=("reason",),
        read=lambda s: [((reason,), s.metrics.worker_losses[reason]) for reason in LOSS_REASONS],
    ),
    histogram(
        "reliability",
        "worker_replacement_seconds",
        lambda s: s.metrics.replacement_seconds,
        "From a worker's loss until the next one is ready",
    ),
    histogram(
        "reliability",
        "worker_interruption_seconds",
        lambda s: s.metrics.interruption_seconds,
        "From a worker's loss to the next token, if requests were waiting for one",
    ),
    engine_counter(
        "reliability",
        "front_end_restarts",
        lambda s: s.statistics.front_end_restarts,
        "Front ends that died, hung or lost their link, with several front ends",
    ),
    counter(
        "reliability",
        "integrity_violations",
        lambda s: s.metrics.integrity_violations,
        "Checks of the idle engine that found an error; each is a bug, and is logged",
    ),
    Definition(
        name="http_errors",
        kind="counter",
        help="Errors sent to clients, by code, errors in streams included",
        group="reliability",
        labels=("code",),
        common=False,
        read=lambda s: [((code,), count) for code, count in sorted(s.metrics.http_errors.items())],
    ),
    gauge(
        "reliability", "http_connections", lambda s: len(s.metrics.connections), "Open connections"
    ),
)

HTTP = (
    Definition(
        name="http_requests",
        kind="counter",
        help="HTTP requests that ended, by status (499: the client left)",
        group="http",
        labels=("method", "route", "status"),
        common=False,
        read=lambda s: [
            ((method, route, str(status)), count)
            for (method, route, status), count in sorted(s.metrics.http_responses.items())
        ],
    ),
    engine_gauge(
        "http",
        "stream_bytes",
        lambda s: s.statistics.stream_bytes,
        "Bytes of output that wait for slow readers",
    ),
)
