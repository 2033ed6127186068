"""The one table of all metrics: name, type, labels, meaning, and how each is read.

``/metrics``, the documentation's table and the tests all come from :data:`DEFINITIONS`, so they
can't tell different stories. Names, types and labels are vLLM's where it has the metric.
"""

from __future__ import annotations

import time

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
from trioserve.protocol.grammar import GRAMMAR_KINDS
from trioserve.requests.request import FinishReason

ABORT_STAGES = ("tokenizing", "preparing", "waiting", "prefill", "decode")

GRAMMAR_OUTCOMES = ("ok", "refused", "timeout")

LOSS_REASONS = ("killed", "crashed", "hung", "failed")

GROUPS = {
    "requests": "Requests",
    "latency": "Latency",
    "tokens": "Tokens",
    "cache": "KV cache",
    "worker": "Worker",
    "reliability": "Reliability",
    "http": "HTTP",
}
"""The title of every group of metrics, in the order in which the documentation shows them."""


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


_REQUESTS = (
    engine_gauge(
        "requests",
        "num_requests_running",
        lambda s: s.scheduler.num_running,
        "Outputs being computed",
    ),
    engine_gauge(
        "requests",
        "num_requests_waiting",
        lambda s: s.scheduler.num_waiting + s.num_deferred,
        "Requests and outputs that wait: to be computed, or to be computed again",
    ),
    Definition(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="Those in line (`capacity`), and those on their way there (`deferred`)",
        group="requests",
        labels=("reason",),
        watching=True,
        read=lambda s: [(("capacity",), s.scheduler.num_waiting), (("deferred",), s.num_deferred)],
    ),
    Definition(
        name="request_success",
        kind="counter",
        help="Outputs that ended, by why; a request has `n` of them",
        group="requests",
        labels=("finished_reason",),
        read=lambda s: [((each.value,), s.metrics.finished[each.value]) for each in FinishReason],
    ),
    Definition(
        name="request_aborts",
        kind="counter",
        help="Outputs that were aborted, by how far they had come",
        group="requests",
        labels=("stage",),
        read=lambda s: [((stage,), s.metrics.aborts[stage]) for stage in ABORT_STAGES],
    ),
    counter(
        "requests",
        "request_rejections",
        lambda s: s.metrics.num_rejected,
        "Requests that couldn't be served and were refused before they waited in line",
    ),
    engine_counter(
        "requests",
        "corrupted_requests",
        lambda s: s.scheduler.num_corrupted,
        "Requests that ended with an error because the model's logits held NaN",
    ),
    engine_counter(
        "requests",
        "num_preemptions",
        lambda s: s.scheduler.num_preemptions,
        "Outputs that lost their pages to others",
    ),
    histogram("requests", "request_params_n", lambda s: s.metrics.request_n, "`n` of a request"),
    histogram(
        "requests",
        "request_params_max_tokens",
        lambda s: s.metrics.request_max_tokens,
        "`max_tokens` of a request that sets it",
    ),
)

_LATENCY = (
    histogram(
        "latency",
        "time_to_first_token_seconds",
        lambda s: s.metrics.time_to_first_token,
        "From a request's arrival to its first token",
    ),
    histogram(
        "latency",
        "inter_token_latency_seconds",
        lambda s: s.metrics.inter_token_latency,
        "Between two tokens of an output; one observation for each token but the first",
    ),
    histogram(
        "latency",
        "request_time_per_output_token_seconds",
        lambda s: s.metrics.time_per_output_token,
        "The mean of that over an output; one observation for each output",
    ),
    histogram(
        "latency",
        "request_tokens_per_second",
        lambda s: s.metrics.tokens_per_second,
        "Tokens of an output behind its first one, over their time; one observation for each "
        "output of several tokens",
    ),
    histogram(
        "latency",
        "e2e_request_latency_seconds",
        lambda s: s.metrics.e2e_latency,
        "From a request's arrival to the end of its last output",
    ),
    histogram(
        "latency",
        "request_queue_time_seconds",
        lambda s: s.metrics.queue_time,
        "A request's time in line, until its first step",
    ),
    histogram(
        "latency",
        "request_prefill_time_seconds",
        lambda s: s.metrics.prefill_time,
        "From a request's first step to its first token",
    ),
    histogram(
        "latency",
        "request_decode_time_seconds",
        lambda s: s.metrics.decode_time,
        "From a request's first token to its last",
    ),
    histogram(
        "latency",
        "request_inference_time_seconds",
        lambda s: s.metrics.inference_time,
        "From a request's first step to its last token",
    ),
    histogram(
        "latency",
        "event_loop_lag_seconds",
        lambda s: s.metrics.loop_lag.histogram,
        "How late the server's event loop was, measured ten times a second",
    ),
    gauge(
        "latency",
        "event_loop_lag_peak_seconds",
        lambda s: s.metrics.loop_lag.peak,
        "The worst of that in the last 15 seconds",
    ),
)

_TOKENS = (
    counter(
        "tokens",
        "prompt_tokens",
        lambda s: s.metrics.prompt_tokens,
        "Tokens of computed prompts, cached ones included; a prompt counts once, whatever `n`",
    ),
    Definition(
        name="prompt_tokens_by_source",
        kind="counter",
        help="Those computed (`local_compute`) and those found cached (`local_cache_hit`)",
        group="tokens",
        labels=("source",),
        read=lambda s: [
            (("local_compute",), s.metrics.prompt_tokens - s.metrics.cached_prompt_tokens),
            (("local_cache_hit",), s.metrics.cached_prompt_tokens),
        ],
    ),
    counter(
        "tokens",
        "prompt_tokens_cached",
        lambda s: s.metrics.cached_prompt_tokens,
        "Tokens of prompts that were found in the prefix cache",
    ),
    counter(
        "tokens", "generation_tokens", lambda s: s.metrics.generation_tokens, "Tokens generated"
    ),
    histogram(
        "tokens",
        "iteration_tokens_total",
        lambda s: s.metrics.iteration_tokens,
        "Tokens of one step: those prefilled and those sampled",
    ),
    histogram(
        "tokens",
        "request_prompt_tokens",
        lambda s: s.metrics.request_prompt_tokens,
        "Tokens of a request's prompt",
    ),
    histogram(
        "tokens",
        "request_prefill_kv_computed_tokens",
        lambda s: s.metrics.request_prefill_tokens,
        "Tokens of a request's prompt that had to be computed",
    ),
    histogram(
        "tokens",
        "request_generation_tokens",
        lambda s: s.metrics.request_generation_tokens,
        "Tokens of an output",
    ),
    histogram(
        "tokens",
        "request_max_num_generation_tokens",
        lambda s: s.metrics.request_most_generation_tokens,
        "Tokens of the longest of a request's outputs",
    ),
)

_CACHE = (
    engine_gauge(
        "cache",
        "kv_cache_usage_perc",
        lambda s: s.scheduler.pages_held / max(s.scheduler.pages_total, 1),
        "Share of the KV cache's pages that requests hold; 1 is all",
    ),
    Definition(
        name="kv_cache_pages",
        kind="gauge",
        help="Pages by what they are: `held` by requests, `cached` for prompts to come, or `free`",
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
        "cache", "prefix_cache_hits", lambda s: s.scheduler.prefix_cache_hits, "Tokens found there"
    ),
    engine_counter(
        "cache",
        "kv_cache_evicted_pages",
        lambda s: s.scheduler.pages_evicted,
        "Cached pages whose content was lost to others",
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
        "Pages that were copied back from there",
    ),
    Definition(
        name="kv_cache_host_pages",
        kind="gauge",
        help="Room for pages in the host's memory: `cached` for prompts to come, or `free`",
        group="cache",
        labels=("state",),
        watching=True,
        read=lambda s: [
            (("cached",), s.scheduler.host_pages_cached),
            (("free",), s.scheduler.host_pages_total - s.scheduler.host_pages_cached),
        ],
    ),
    engine_gauge(
        "cache", "sessions", lambda s: s.statistics.num_sessions, "Sessions that are open"
    ),
    counter("cache", "mm_cache_queries", lambda _: 0, "Media looked up; none is served"),
    counter("cache", "mm_cache_hits", lambda _: 0, "Media found; none is served"),
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


def _adapters(scrape: Scrape) -> Samples:
    if not scrape.engine.config.serves_adapters:
        return []
    scheduler = scrape.scheduler
    names = ",".join(scheduler.waiting_adapters), ",".join(scheduler.running_adapters)
    return [((str(scrape.engine.config.max_loras), *names), time.time())]


_ADAPTERS = (
    Definition(
        name="lora_requests_info",
        kind="gauge",
        help="Unix time; the labels name the adapters of requests that wait and that run",
        group="requests",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        common=False,
        watching=True,
        read=_adapters,
    ),
)

_WORKER = (
    engine_counter("worker", "worker_steps", lambda s: s.scheduler.num_steps, "Steps computed"),
    engine_counter(
        "worker",
        "worker_step_seconds",
        lambda s: s.scheduler.step_us / 1e6,
        "Time that the device computed steps",
    ),
    engine_counter(
        "worker",
        "worker_idle_seconds",
        lambda s: s.scheduler.idle_us / 1e6,
        "Time that the device computed nothing while there was work: between steps, and in steps "
        "while data was copied",
    ),
    engine_counter(
        "worker",
        "worker_launch_seconds",
        lambda s: s.scheduler.launch_us / 1e6,
        "Time that the worker took to queue steps on a GPU; one that launches kernels one by one, "
        "and takes as long as the step, leaves the GPU waiting between them",
    ),
    engine_gauge(
        "worker",
        "worker_plans_in_flight",
        lambda s: s.scheduler.plans_in_flight,
        "Steps sent whose results haven't come",
    ),
    engine_counter(
        "worker",
        "worker_restarts",
        lambda s: s.statistics.worker_restarts,
        "Workers started in place of a dead one",
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
        "How long a worker took for that",
    ),
)

_RELIABILITY = (
    Definition(
        name="worker_losses",
        kind="counter",
        help="Workers lost: `killed` from outside, `crashed`, `hung` past the watchdog's time, or "
        "`failed`: said that they can't go on, or nonsense",
        group="reliability",
        labels=("reason",),
        read=lambda s: [((reason,), s.metrics.worker_losses[reason]) for reason in LOSS_REASONS],
    ),
    histogram(
        "reliability",
        "worker_replacement_seconds",
        lambda s: s.metrics.replacement_seconds,
        "From a worker's loss to the moment in which the next one is ready",
    ),
    histogram(
        "reliability",
        "worker_interruption_seconds",
        lambda s: s.metrics.interruption_seconds,
        "From a worker's loss to the next token, where requests waited for it",
    ),
    engine_counter(
        "reliability",
        "front_end_restarts",
        lambda s: s.statistics.front_end_restarts,
        "Front ends started in place of one that died or hung, where there are several",
    ),
    counter(
        "reliability",
        "integrity_violations",
        lambda s: s.metrics.integrity_violations,
        "Looks at the idle engine that found something wrong; each is a bug, and in the log",
    ),
    Definition(
        name="http_errors",
        kind="counter",
        help="Errors that clients got, by their code, those that ended a stream included",
        group="reliability",
        labels=("code",),
        common=False,
        read=lambda s: [((code,), count) for code, count in sorted(s.metrics.http_errors.items())],
    ),
    gauge(
        "reliability", "http_connections", lambda s: len(s.metrics.connections), "Open connections"
    ),
)

_HTTP = (
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
        "Output that waits for slow readers",
    ),
)

DEFINITIONS: tuple[Definition, ...] = (
    *(*_REQUESTS, *_ADAPTERS, *_LATENCY, *_TOKENS, *_CACHE, *_WORKER, *_RELIABILITY, *_HTTP),
)
