"""The names, types and labels of metrics are vLLM's, so that dashboards made for it work."""

from __future__ import annotations

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.metric_samples import Watched
from trioserve import EngineConfig, InvalidRequest
from trioserve.observability.metrics import DEFINITIONS, Metrics


def _words(text: str) -> list[str]:
    return text.split()


# What vLLM's own test of its /metrics looks for in the text.
TESTED_NAMES = _words("""
cache_config_info generation_tokens_total inter_token_latency_seconds_bucket
inter_token_latency_seconds_count inter_token_latency_seconds_sum iteration_tokens_total
kv_cache_usage_perc mm_cache_hits mm_cache_queries num_preemptions_total num_requests_running
num_requests_waiting num_requests_waiting_by_reason prefix_cache_hits prefix_cache_queries
prompt_tokens_total request_decode_time_seconds_bucket request_decode_time_seconds_count
request_decode_time_seconds_sum request_generation_tokens_bucket request_generation_tokens_count
request_generation_tokens_sum request_inference_time_seconds_bucket
request_inference_time_seconds_count request_inference_time_seconds_sum
request_params_max_tokens_bucket request_params_max_tokens_count request_params_max_tokens_sum
request_params_n_bucket request_params_n_count request_params_n_sum
request_prefill_time_seconds_bucket request_prefill_time_seconds_count
request_prefill_time_seconds_sum request_prompt_tokens_bucket request_prompt_tokens_count
request_prompt_tokens_sum request_queue_time_seconds_bucket request_queue_time_seconds_count
request_queue_time_seconds_sum request_success_total time_to_first_token_seconds_bucket
time_to_first_token_seconds_count time_to_first_token_seconds_sum
""")

# What the queries of vLLM's Grafana dashboards use, as samples.
DASHBOARD_NAMES = _words("""
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count
e2e_request_latency_seconds_sum generation_tokens_total inter_token_latency_seconds_bucket
inter_token_latency_seconds_count inter_token_latency_seconds_sum iteration_tokens_total_count
kv_cache_usage_perc num_requests_running num_requests_waiting prompt_tokens_total
request_decode_time_seconds_sum request_generation_tokens_bucket
request_max_num_generation_tokens_sum request_prefill_time_seconds_sum
request_prompt_tokens_bucket request_queue_time_seconds_sum request_success_total
time_to_first_token_seconds_bucket time_to_first_token_seconds_count
time_to_first_token_seconds_sum
""")

# vLLM's families that are here: type, and labels beside model_name and engine.
FAMILIES = {
    "cache_config_info": (
        "gauge",
        {
            *("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"),
            *("kv_cache_memory_bytes", "num_gpu_blocks", "num_gpu_blocks_override"),
        },
    ),
    "corrupted_requests": ("counter", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "engine_sleep_state": ("gauge", {"sleep_state"}),
    "generation_tokens": ("counter", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "mm_cache_hits": ("counter", set()),
    "mm_cache_queries": ("counter", set()),
    "num_preemptions": ("counter", set()),
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "num_requests_waiting_by_reason": ("gauge", {"reason"}),
    "prefix_cache_hits": ("counter", set()),
    "prefix_cache_queries": ("counter", set()),
    "prompt_tokens": ("counter", set()),
    "prompt_tokens_by_source": ("counter", {"source"}),
    "prompt_tokens_cached": ("counter", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "request_generation_tokens": ("histogram", set()),
    "request_inference_time_seconds": ("histogram", set()),
    "request_max_num_generation_tokens": ("histogram", set()),
    "request_params_max_tokens": ("histogram", set()),
    "request_params_n": ("histogram", set()),
    "request_prefill_kv_computed_tokens": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_prompt_tokens": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_success": ("counter", {"finished_reason"}),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "time_to_first_token_seconds": ("histogram", set()),
}

# Bounds that vLLM's histograms have; there may be others between them.
_TOKEN_SECONDS = {
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
}
_REQUEST_SECONDS = {
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
}
_TOKENS = {1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0, 10_000.0, 20_000.0, 100_000.0}
BOUNDS = {
    "time_to_first_token_seconds": {
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    },
    "inter_token_latency_seconds": _TOKEN_SECONDS,
    "request_time_per_output_token_seconds": _TOKEN_SECONDS,
    "iteration_tokens_total": {1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 16384.0},
    "e2e_request_latency_seconds": _REQUEST_SECONDS,
    "request_queue_time_seconds": _REQUEST_SECONDS,
    "request_prefill_time_seconds": _REQUEST_SECONDS,
    "request_decode_time_seconds": _REQUEST_SECONDS,
    "request_inference_time_seconds": _REQUEST_SECONDS,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "request_max_num_generation_tokens": _TOKENS,
    "request_params_max_tokens": _TOKENS,
    "request_prefill_kv_computed_tokens": _TOKENS,
    "request_params_n": {1.0, 2.0, 5.0, 10.0, 20.0},
}


def scrape(prefix: str) -> tuple[str, dict[str, Metric]]:
    """Return the text of a scrape, and its families by name without the prefix."""
    metrics = Metrics("m", prefix)
    metrics.watch(Watched())
    metrics.observe_response("GET", "/health", 200)
    text = metrics.render().decode()
    families = {
        family.name.removeprefix(f"{prefix}:"): family
        for family in text_string_to_metric_families(text)
    }
    return text, families


def test_under_vllms_prefix_is_all_that_its_test_and_dashboards_look_for() -> None:
    text, families = scrape("vllm")
    assert [name for name in TESTED_NAMES if f"vllm:{name}" not in text] == []
    sampled = {sample.name for family in families.values() for sample in family.samples}
    assert [name for name in DASHBOARD_NAMES if f"vllm:{name}" not in sampled] == []


@pytest.mark.parametrize("prefix", ["vllm", "trioserve"])
def test_types_and_labels_are_vllms(prefix: str) -> None:
    _, families = scrape(prefix)
    for name, (kind, labels) in FAMILIES.items():
        family = families[name]
        assert family.type == kind, name
        assert family.samples, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *labels}, name
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("m", "0")


def test_finish_reasons_are_vllms() -> None:
    _, families = scrape("vllm")
    reasons = {sample.labels["finished_reason"] for sample in families["request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


def test_histograms_have_vllms_bounds() -> None:
    _, families = scrape("vllm")
    for name, bounds in BOUNDS.items():
        found = {
            float(sample.labels["le"]) for sample in families[name].samples if "le" in sample.labels
        }
        assert bounds <= found, name
    assert {name for name, (kind, _) in FAMILIES.items() if kind == "histogram"} == set(BOUNDS)


def test_a_scrape_is_the_table_of_definitions_and_nothing_else() -> None:
    text, families = scrape("trioserve")
    assert [definition.name for definition in DEFINITIONS] == list(families)
    for definition in DEFINITIONS:
        family = families[definition.name]
        assert (family.type, family.documentation) == (definition.kind, definition.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(definition.all_labels)
    assert text.endswith("\n")


@pytest.mark.parametrize("prefix", ["", "1st", "a:b", "a-b", "a b", "ä", "x" * 65, 7])
def test_a_prefix_has_to_be_a_word(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match=r"metrics_prefix must be") as caught:
        EngineConfig("m", metrics_prefix=prefix)
    assert caught.value.param == "metrics_prefix"


@pytest.mark.parametrize("prefix", ["vllm", "_a1", "x" * 64])
def test_words(prefix: str) -> None:
    assert EngineConfig("m", metrics_prefix=prefix).metrics_prefix == prefix
