"""Definitions of the metrics of requests: their ends, latencies and tokens."""

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
from trioserve.requests.request import FinishReason

ABORT_STAGES = ("tokenizing", "preparing", "waiting", "prefill", "decode")


def _adapters(scrape: Scrape) -> Samples:
    if not scrape.engine.config.serves_adapters:
        return []
    scheduler = scrape.scheduler
    names = ",".join(scheduler.waiting_adapters), ",".join(scheduler.running_adapters)
    return [((str(scrape.engine.config.max_loras), *names), time.time())]


REQUESTS = (
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
        "Requests and outputs in the queue, new or preempted",
    ),
    Definition(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="Requests in the queue (`capacity`), and on their way to it (`deferred`)",
        group="requests",
        labels=("reason",),
        watching=True,
        read=lambda s: [(("capacity",), s.scheduler.num_waiting), (("deferred",), s.num_deferred)],
    ),
    Definition(
        name="request_success",
        kind="counter",
        help="Outputs that ended, by reason; a request has `n` of them",
        group="requests",
        labels=("finished_reason",),
        read=lambda s: [((each.value,), s.metrics.finished[each.value]) for each in FinishReason],
    ),
    Definition(
        name="request_aborts",
        kind="counter",
        help="Outputs that were aborted, by stage",
        group="requests",
        labels=("stage",),
        read=lambda s: [((stage,), s.metrics.aborts[stage]) for stage in ABORT_STAGES],
    ),
    counter(
        "requests",
        "request_rejections",
        lambda s: s.metrics.num_rejected,
        "Requests that were refused before they were queued",
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
        "Outputs that were preempted: they lost their pages to others",
    ),
    histogram("requests", "request_params_n", lambda s: s.metrics.request_n, "`n` of a request"),
    histogram(
        "requests",
        "request_params_max_tokens",
        lambda s: s.metrics.request_max_tokens,
        "`max_tokens` of a request that sets it",
    ),
)

LATENCY = (
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
        "Mean time between an output's tokens; one observation for each output",
    ),
    histogram(
        "latency",
        "request_tokens_per_second",
        lambda s: s.metrics.tokens_per_second,
        "Tokens of an output after its first one, per second; one observation for each output "
        "of several tokens",
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
        "From a request's arrival in the queue to its first step",
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
        "Lag of the server's event loop, measured ten times a second",
    ),
    gauge(
        "latency",
        "event_loop_lag_peak_seconds",
        lambda s: s.metrics.loop_lag.peak,
        "Largest lag of the event loop in the last 15 seconds",
    ),
)

TOKENS = (
    counter(
        "tokens",
        "prompt_tokens",
        lambda s: s.metrics.prompt_tokens,
        "Tokens of computed prompts, cached ones included; a prompt counts once, whatever `n`",
    ),
    Definition(
        name="prompt_tokens_by_source",
        kind="counter",
        help="Tokens of prompts: computed (`local_compute`) or found cached (`local_cache_hit`)",
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
        "Tokens of a step, prefilled and sampled",
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

ADAPTERS = (
    Definition(
        name="lora_requests_info",
        kind="gauge",
        help="Unix time; the labels name the adapters of waiting and of running requests",
        group="requests",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        common=False,
        watching=True,
        read=_adapters,
    ),
)
