"""A whole server, worker and all: what it tells of itself while it serves and when it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.http_stub import captured_logs, http_client
from tests.support.otlp_collector import collecting
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig, ServerConfig, TrioserveError, serve
from trioserve.front_ends import serving
from trioserve.observability.task_dump import ask_others
from trioserve.testing.fake_engine import open_fake_engine

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_metrics_log_and_spans_of_one_request(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny("llama2", tmp_path)
    shutdown = trio.Event()
    with collecting() as collector, captured_logs() as logs:
        engine = EngineConfig(
            str(folder),
            dtype="float32",
            device="cpu",
            num_threads=1,
            metrics_prefix="vllm",
            otlp_traces_endpoint=collector.url,
        )
        config = ServerConfig(
            engine=engine,
            port=0,
            served_model_name=("mine",),
            log_requests=True,
            admin_api_key=("admin",),
        )
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(lambda **kw: serve(config, shutdown=shutdown, **kw))
            async with http_client(url) as client:
                response = await client.post(
                    "/v1/completions",
                    json={"model": "mine", "prompt": "hello", "max_tokens": 3, "ignore_eos": True},
                    headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"},
                )
                usage = response.json()["usage"]
                with trio.fail_after(30):
                    while 'event_loop_lag_seconds_count{engine="0",model_name="mine"} 0.0' in (
                        scrape := (await client.get("/metrics")).text
                    ):
                        await trio.sleep(0.05)
                admin = {"Authorization": "Bearer admin"}
                dump = (await client.get("/debug/tasks", headers=admin)).text
                ask_others()
                with trio.fail_after(60):
                    threads = ""
                    while "in main\n" not in threads:
                        threads += capfd.readouterr().err
                        await trio.sleep(0.05)
            shutdown.set()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if sample.labels.get("model_name") == "mine"
    }
    assert found["vllm:generation_tokens_total"] == usage["completion_tokens"] == 3
    assert found["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["vllm:event_loop_lag_seconds_count"] >= 1
    assert found["vllm:worker_step_seconds_total"] > 0
    assert found["vllm:http_connections"] == 1
    assert found["vllm:integrity_violations_total"] == 0
    assert not any(name.startswith("trioserve:") for name in found)

    assert "gpu/worker.py" in threads
    assert re.match(r"worker process: \d+\nengine .*\nrequests open: 0;", dump)
    line = next(entry for entry in logs if entry["event"] == "request")
    assert (line["trace_id"], line["n"], line["prompts"]) == (TRACE_ID, 1, ["hello"])
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["duration_ms"]
    json.dumps(line)

    ((_, _, message),) = collector.requests
    (span,) = message.resource_spans[0].scope_spans[0].spans
    attributes = {each.key: each.value for each in span.attributes}
    assert span.trace_id.hex() == TRACE_ID
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3
    assert attributes["gen_ai.response.finish_reasons"].array_value.values[0].string_value == (
        "length"
    )
    assert attributes["gen_ai.latency.e2e"].double_value > 0


async def test_an_error_of_the_server_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the task that measures beside it wraps no error in a group."""

    async def fail(*_: Any, **__: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise TrioserveError("no place to listen")

    monkeypatch.setattr(serving, "open_engine", lambda *_, **__: open_fake_engine())
    monkeypatch.setattr("trioserve.http.serve_app", fail)
    with pytest.raises(TrioserveError, match="no place to listen"):
        await serve(ServerConfig(engine=EngineConfig("m"), port=0))
