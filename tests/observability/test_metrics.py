"""The counters of metrics, and their values in a scrape."""

from __future__ import annotations

import time
from typing import Any

import pytest
import trio

from tests.support.metric_samples import Watched, finish, make_request, samples, value
from trioserve.observability.metrics import Histogram, Metrics, measure_loop_lag
from trioserve.observability.metrics.loop_lag import INTERVAL, WINDOW, LoopLag
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import FinishReason, State, Times
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine


class TestHistogram:
    def test_bounds_are_inclusive_from_above(self) -> None:
        histogram = Histogram((1.0, 2.0, 5.0))
        for observed in (0.5, 1.0, 1.5, 5.0, 6.0):
            histogram.observe(observed)
        assert histogram.counts == [2, 1, 1, 1]
        assert histogram.total == 14.0
        assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("5.0", 4.0), ("+Inf", 5.0)]

    def test_many_at_once(self) -> None:
        one, many = Histogram((1.0,)), Histogram((1.0,))
        for _ in range(3):
            one.observe(0.5)
        many.observe(0.5, 3)
        assert (one.counts, one.total) == (many.counts, many.total)

    def test_a_span_without_an_end_is_no_observation(self) -> None:
        histogram = Histogram((1.0,))
        histogram.observe_span(1.0, None)
        histogram.observe_span(None, 1.0)
        assert histogram.counts == [0, 0]
        histogram.observe_span(1.0, 1.5)
        assert (histogram.counts, histogram.total) == ([1, 0], 0.5)


TIMES = Times(
    arrived=10.0,
    queued=10.5,
    first_scheduled=12.5,
    first_token=13.5,
    last_token=17.5,
    finished=18.0,
)


def test_a_finished_request() -> None:
    metrics = Metrics("m")
    request = make_request(TIMES, 30, 5, max_tokens=5)
    (sequence,) = request.sequences
    sequence.last_token = 17.5
    finish(metrics, sequence, FinishReason.LENGTH)
    for name, total in (
        ("e2e_request_latency_seconds", 8.0),
        ("request_queue_time_seconds", 2.0),
        ("request_prefill_time_seconds", 1.0),
        ("request_decode_time_seconds", 4.0),
        ("request_inference_time_seconds", 5.0),
        ("request_time_per_output_token_seconds", 1.0),
        ("request_prompt_tokens", 30.0),
        ("request_generation_tokens", 5.0),
        ("request_max_num_generation_tokens", 5.0),
        ("request_params_n", 1.0),
        ("request_params_max_tokens", 5.0),
    ):
        assert value(metrics, f"{name}_sum") == total
        assert value(metrics, f"{name}_count") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_success_total", finished_reason="stop") == 0


def test_a_prompt_counts_once_and_each_of_its_outputs_for_itself() -> None:
    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0), 30, 4, 6, 5)
    request.num_cached_tokens = 16
    first, second, third = request.sequences
    for sequence in request.sequences:
        metrics.observe_tokens(sequence, 1, 2.0)
        request.times.first_token = sequence.last_token = 2.0
    metrics.observe_tokens(first, 1, 2.5)
    request.times.last_token = first.last_token = 2.5
    metrics.observe_tokens(second, 1, 3.0)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.5
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "prompt_tokens_total") == 30
    assert value(metrics, "prompt_tokens_cached_total") == 16
    assert value(metrics, "prompt_tokens_by_source_total", source="local_compute") == 14
    assert value(metrics, "prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 14

    finish(metrics, second, FinishReason.STOP)
    finish(metrics, first, FinishReason.LENGTH)
    assert value(metrics, "request_prompt_tokens_count") == 0
    request.times.finished = 4.0
    finish(metrics, third, FinishReason.STOP)
    assert value(metrics, "request_success_total", finished_reason="stop") == 2
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_generation_tokens_count") == 3
    assert value(metrics, "request_generation_tokens_sum") == 15
    for name, total in (
        ("request_prompt_tokens", 30),
        ("request_max_num_generation_tokens", 6),
        ("request_params_n", 3),
        ("e2e_request_latency_seconds", 3.0),
    ):
        assert value(metrics, f"{name}_count") == 1
        assert value(metrics, f"{name}_sum") == total
    assert value(metrics, "request_params_max_tokens_count") == 0
    assert value(metrics, "prompt_tokens_total") == 30
    # The first has 3 tokens from 2.0 to 2.5; the last ones of the others aren't timed.
    assert value(metrics, "request_tokens_per_second_count") == 1
    assert value(metrics, "request_tokens_per_second_sum") == 3 / 0.5


def test_a_request_that_ended_early_counts_what_it_had() -> None:
    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0, finished=3.0), 7, 0)
    finish(metrics, request.sequences[0], FinishReason.ABORT)
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_time_per_output_token_seconds_count") == 0
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert value(metrics, "prompt_tokens_total") == 0


def test_a_request_for_its_prompt_alone_counts_it() -> None:
    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0, first_scheduled=1.0, finished=3.0), 7, 0)
    request.num_cached_tokens = 4
    finish(metrics, request.sequences[0], FinishReason.LENGTH)
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 3
    assert value(metrics, "time_to_first_token_seconds_count") == 0


def test_a_refused_request_is_no_output_that_ended() -> None:
    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0), 0, 0, 0)
    request.reject(ContextTooLong("too long", param="prompt"))
    for sequence in request.sequences:
        finish(metrics, sequence, FinishReason.ERROR)
    assert value(metrics, "request_rejections_total") == 1
    assert value(metrics, "request_success_total", finished_reason="error") == 0
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize(
    ("states", "num_prompt", "stage"),
    [
        ((), 0, "tokenizing"),
        ((State.TOKENIZING,), 0, "tokenizing"),
        ((State.TOKENIZING,), 3, "preparing"),
        ((State.WAITING,), 3, "waiting"),
        ((State.WAITING, State.PREFILL), 3, "prefill"),
        ((State.WAITING, State.PREFILL, State.DECODE), 3, "decode"),
        ((State.WAITING, State.PREFILL, State.PREEMPTED), 3, "waiting"),
    ],
)
def test_aborts_are_counted_by_stage(
    states: tuple[State, ...], num_prompt: int, stage: str
) -> None:
    metrics = Metrics("m")
    (sequence,) = make_request(Times(arrived=1.0), num_prompt, 0).sequences
    for state in (*states, State.FINISHED):
        sequence.move_to(state)
    finish(metrics, sequence, FinishReason.ABORT)
    counts = {
        dict(labels)["stage"]: count
        for (name, labels), count in samples(metrics).items()
        if name == "trioserve:request_aborts_total"
    }
    assert counts.pop(stage) == 1
    assert set(counts) | {stage} == {"tokenizing", "preparing", "waiting", "prefill", "decode"}
    assert not any(counts.values())


def test_tokens_and_steps() -> None:
    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0), 3, 0)
    (sequence,) = request.sequences
    metrics.observe_tokens(sequence, 1, 1.5)
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert value(metrics, "inter_token_latency_seconds_count") == 0
    request.times.first_token = sequence.last_token = 1.5
    metrics.observe_tokens(sequence, 2, 1.9)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "generation_tokens_total") == 3
    metrics.observe_step(17)
    assert value(metrics, "iteration_tokens_total_sum") == 17


def test_a_token_costs_no_more_than_a_few_calls() -> None:
    """Less than a microsecond, where a call of a function of three arguments takes 40 ns."""

    def nothing(_sequence: object, _count: int, _now: float) -> None:
        pass

    metrics = Metrics("m")
    request = make_request(Times(arrived=1.0, first_token=1.5), 3, 0)
    (sequence,) = request.sequences
    sequence.last_token = 1.5
    least: dict[object, float] = {}
    for _ in range(20):
        for function in (nothing, metrics.observe_tokens):
            start = time.thread_time()
            for _ in range(500):
                function(sequence, 1, 1.52)
            seconds = time.thread_time() - start
            least[function] = min(least.get(function, seconds), seconds)
    assert least[metrics.observe_tokens] < 20 * least[nothing]


def test_grammars() -> None:
    metrics = Metrics("m")
    metrics.observe_grammar("regex", "ok", 0.25)
    metrics.observe_grammar("regex", "refused", 0.5)
    name = "grammar_compilations_total"
    assert value(metrics, name, kind="regex", outcome="ok") == 1
    assert value(metrics, name, kind="regex", outcome="refused") == 1
    assert value(metrics, name, kind="json_schema", outcome="ok") == 0
    assert value(metrics, "grammar_compilation_seconds_sum") == 0.75


def test_http_responses() -> None:
    metrics = Metrics("m")
    for status in (200, 200, 499):
        metrics.observe_response("POST", "/v1/completions", status)
    labels = (("method", "POST"), ("route", "/v1/completions"))
    found = samples(metrics)
    assert found["trioserve:http_requests_total", (*labels, ("status", "200"))] == 2
    assert found["trioserve:http_requests_total", (*labels, ("status", "499"))] == 1


def test_gauges_are_read_when_somebody_asks() -> None:
    metrics = Metrics("m")
    assert not any("num_requests_running" in name for name, _ in samples(metrics))
    metrics.watch(Watched())
    expected = {
        "num_requests_running": 2,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.25,
        "stream_bytes": 77,
        "num_preemptions_total": 4,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "kv_cache_evicted_pages_total": 9,
        "kv_cache_offloaded_pages_total": 12,
        "kv_cache_onloaded_pages_total": 11,
        "sessions": 3,
        "worker_steps_total": 7,
        "worker_step_seconds_total": 2.5,
        "worker_idle_seconds_total": 0.25,
        "worker_launch_seconds_total": 0.125,
        "worker_plans_in_flight": 1,
        "worker_restarts_total": 5,
        "front_end_restarts_total": 4,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    by_reason = "num_requests_waiting_by_reason"
    assert value(metrics, by_reason, reason="capacity") == 3
    assert value(metrics, by_reason, reason="deferred") == 1
    pages = [value(metrics, "kv_cache_pages", state=each) for each in ("held", "cached", "free")]
    assert pages == [2, 5, 1]
    places = [value(metrics, "kv_cache_host_pages", state=each) for each in ("cached", "free")]
    assert places == [3, 7]
    assert [value(metrics, "worker_up", worker=each) for each in "01"] == [1, 0]
    usage = [value(metrics, "worker_kv_cache_usage_perc", worker=each) for each in "01"]
    assert usage == [0.5, 0]
    states = {
        state: value(metrics, "engine_sleep_state", sleep_state=state)
        for state in ("awake", "weights_offloaded", "discard_all")
    }
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def test_the_cache_is_described_by_labels() -> None:
    metrics = Metrics("m")
    metrics.watch(Watched())
    (labels,) = [
        dict(labels) for name, labels in samples(metrics) if name == "trioserve:cache_config_info"
    ]
    assert labels == {
        "model_name": "m",
        "engine": "0",
        "block_size": "4",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.9",
        "kv_cache_memory_bytes": "1048576",
        "num_gpu_blocks": "8",
        "num_gpu_blocks_override": "None",
    }


def test_engines_do_not_share_a_registry() -> None:
    one, other = Metrics("m"), Metrics("m")
    one.observe_tokens(make_request(Times(arrived=0.0), 3, 0).sequences[0], 5, 1.0)
    assert value(one, "generation_tokens_total") == 5
    assert value(other, "generation_tokens_total") == 0


def test_buckets_only_grow() -> None:
    metrics = Metrics("m")
    histograms = [item for item in vars(metrics).values() if isinstance(item, Histogram)]
    assert len(histograms) == 20
    for histogram in (*histograms, metrics.loop_lag.histogram):
        assert list(histogram.bounds) == sorted(set(histogram.bounds))


class TestLoopLag:
    async def test_a_loop_that_was_held_up_is_late(self) -> None:
        lag = LoopLag()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure_loop_lag, lag)
            await trio.testing.wait_all_tasks_blocked()
            time.sleep(INTERVAL + 0.05)
            while not lag.histogram.total:
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert 0.05 <= lag.peak < 60
        assert sum(lag.histogram.counts) >= 1

    async def test_one_that_was_not_is_on_time(self, autojump_clock: object) -> None:
        lag = LoopLag()
        with trio.move_on_after(1.05):
            await measure_loop_lag(lag)
        assert (sum(lag.histogram.counts), lag.peak) == (10, 0.0)

    async def test_long_delays_are_in_the_log_but_not_all_of_them(
        self, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure_loop_lag, LoopLag())
            for seconds in (0.5, 3.0, 4.0, 5.0):
                await trio.testing.wait_all_tasks_blocked()
                autojump_clock.jump(seconds + INTERVAL)
                await trio.sleep(1)
            nursery.cancel_scope.cancel()
        warnings = [record.__dict__["fields"]["seconds"] for record in caplog.records]
        assert warnings == pytest.approx([3, 5], abs=INTERVAL + 0.01)

    def test_a_peak_is_forgotten(self) -> None:
        metrics = Metrics("m")
        metrics.loop_lag.observe(0.75)
        for _ in range(round(WINDOW / INTERVAL) - 1):
            metrics.loop_lag.observe(0.0)
        assert value(metrics, "event_loop_lag_peak_seconds") == 0.75
        metrics.loop_lag.observe(0.0)
        assert value(metrics, "event_loop_lag_peak_seconds") == 0.0
        assert value(metrics, "event_loop_lag_seconds_sum") == 0.75


async def test_an_engine_counts_its_grammars(autojump_clock: object) -> None:
    def prepare(arguments: Any) -> Any:
        kind, text = arguments["grammar"]
        return {"error": f"no such {kind}", "param": "grammar"} if text == "(" else None

    async with open_fake_engine(lambda: FakeWorker(calls={"prepare": prepare})) as engine:
        for text in ("a+", "a+", "b+"):
            await engine.complete("x", max_tokens=1, grammar=Grammar("regex", text))
        with pytest.raises(InvalidRequest):
            await engine.complete("x", max_tokens=1, grammar=Grammar("regex", "("))
        assert engine.metrics.grammars == {("regex", "ok"): 2, ("regex", "refused"): 1}
        assert sum(engine.metrics.grammar_seconds.counts) == 3
        assert engine.metrics.num_rejected == 1


async def test_an_engine_counts_where_its_requests_were_left(autojump_clock: object) -> None:
    """In prefill, queued behind it, and in decode."""
    async with open_fake_engine(
        lambda: FakeWorker(step_time=1.0), max_num_seqs=1, max_num_batched_tokens=8
    ) as engine:
        async with engine.generate([1] * 40, max_tokens=3, request_id="running"):
            async with engine.generate([1] * 4, max_tokens=3, request_id="waiting"):
                await trio.sleep(1.5)
        async with engine.generate([1] * 4, max_tokens=30) as stream:
            await stream.receive()
        aborts = engine.metrics.aborts
        assert aborts == {"prefill": 1, "waiting": 1, "decode": 1}
        assert engine.metrics.finished == {"abort": 3}
        assert engine.metrics.prompt_tokens == 4


async def test_an_engine_counts_who_leaves_while_a_grammar_is_prepared(
    autojump_clock: object,
) -> None:
    async with open_fake_engine(lambda: FakeWorker(call_time=5.0)) as engine:
        with trio.move_on_after(1):
            await engine.complete("x", max_tokens=1, grammar=Grammar("regex", "a"))
        assert engine.metrics.aborts == {"preparing": 1}


async def test_an_engine_counts_a_prompt_of_several_outputs_once(autojump_clock: object) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0)) as engine:
        await engine.complete("hello", max_tokens=4, n=3)
        metrics = engine.metrics
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (5, 12)
        assert metrics.finished == {"length": 3}
        assert sum(metrics.time_to_first_token.counts) == 1
        assert (sum(metrics.inter_token_latency.counts), metrics.inter_token_latency.total) == (
            9,
            9,
        )
        for histogram in (metrics.e2e_latency, metrics.request_prompt_tokens, metrics.request_n):
            assert sum(histogram.counts) == 1
        assert sum(metrics.request_generation_tokens.counts) == 3


async def test_an_engine_counts_a_prompt_without_an_output(autojump_clock: object) -> None:
    async with open_fake_engine() as engine:
        completion = await engine.complete("hello", max_tokens=0)
        assert completion.usage.completion_tokens == 0
        metrics = engine.metrics
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (5, 0)
        assert metrics.finished == {"length": 1}
        assert sum(metrics.time_to_first_token.counts) == 0
