"""Metrics of failures: workers lost, durations, errors by code."""

from __future__ import annotations

import pytest
import trio

from tests.support.http_stub import Call, StubEngine, client_of
from tests.support.metric_samples import samples, value
from trioserve.config import EngineConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.counters import REFUSALS
from trioserve.observability.metrics.engine_definitions import LOSS_REASONS
from trioserve.observability.metrics.recorder import MAX_ERROR_CODES
from trioserve.protocol.errors import QueueFull, WorkerLost
from trioserve.testing import FakeWorker
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker


def losses(metrics: Metrics) -> dict[str, float]:
    """Return the workers lost for each reason, without reasons of none."""
    counts = {
        reason: value(metrics, "worker_losses_total", model_name="fake", reason=reason)
        for reason in LOSS_REASONS
    }
    return {reason: count for reason, count in counts.items() if count}


def histogram(metrics: Metrics, name: str) -> tuple[float, float]:
    """Number and sum of what was observed."""
    return (
        value(metrics, f"{name}_count", model_name="fake"),
        value(metrics, f"{name}_sum", model_name="fake"),
    )


async def test_a_hung_worker_is_counted_with_the_pause_that_it_made(
    autojump_clock: object,
) -> None:
    workers = iter([FakeWorker(step_time=1e6), FakeWorker(step_time=0.5)])
    async with open_fake_engine(lambda: next(workers), watchdog_timeout=10) as engine:
        metrics = engine.metrics
        await engine.complete("x", max_tokens=4)
        assert losses(metrics) == {"hung": 1}
        # A step of half a second comes after the new worker, 50 ms after the loss.
        assert histogram(metrics, "worker_replacement_seconds") == pytest.approx((1, 0.05))
        assert histogram(metrics, "worker_interruption_seconds") == pytest.approx((1, 0.55))
        assert value(metrics, "worker_restarts_total", model_name="fake") == 1


async def test_a_worker_killed_while_nobody_waits_interrupts_nobody(
    autojump_clock: object,
) -> None:
    config = EngineConfig("fake")
    kills = [trio.Event() for _ in range(3)]
    left = iter(kills)
    async with open_fake_engine(
        open_worker=lambda: run_fake_worker(
            FakeWorker(step_time=0.5), config, killed=next(left, None)
        )
    ) as engine:
        kills[0].set()
        await trio.sleep(5)
        await engine.complete("x", max_tokens=2)
        # The waiting requests left before a token: the next request's token doesn't end a pause.
        async with engine.generate("x", max_tokens=9) as stream:
            await stream.receive()
            kills[1].set()
            await trio.sleep(0.01)
        await trio.sleep(100)
        await engine.complete("x", max_tokens=2)
        assert losses(engine.metrics) == {"killed": 2}
        assert histogram(engine.metrics, "worker_interruption_seconds") == (0, 0)
        assert histogram(engine.metrics, "worker_replacement_seconds")[0] == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "failed"),
        ({"reason": "crashed"}, "crashed"),
        ({"reason": "crashed", "from_outside": True}, "killed"),
        ({"reason": "unreachable", "from_outside": True}, "unreachable"),
    ],
)
def test_the_reason_of_a_loss(options: dict[str, str], reason: str) -> None:
    metrics = Metrics("fake")
    metrics.worker_lost(WorkerLost("gone", **options))  # type: ignore[arg-type]
    assert losses(metrics) == {reason: 1}


def errors(metrics: Metrics) -> dict[str, float]:
    return {
        dict(labels)["code"]: count
        for (name, labels), count in samples(metrics).items()
        if name == "trioserve:http_errors_total" and count
    }


async def test_errors_are_counted_by_their_code() -> None:
    async def refuse(_: Call) -> None:
        raise QueueFull("full")

    stub = StubEngine(admit=refuse)
    client = client_of(stub, max_body_size=1000)
    await client.get("/health")
    assert set(dict(samples(stub.metrics))) >= {
        ("trioserve:http_errors_total", (("code", code),)) for code in REFUSALS
    }
    for _ in range(2):
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 429
    await client.post("/v1/completions", json={"prompt": "x" * 2000})
    await client.get("/nowhere")
    assert errors(stub.metrics) == {"queue_full": 2, "request_too_large": 1, "not_found": 1}


def test_codes_are_bounded() -> None:
    metrics = Metrics("m")
    for number in range(MAX_ERROR_CODES * 2):
        metrics.observe_error(f"code-{number}")
    metrics.observe_error("queue_full")
    assert len(metrics.http_errors) == MAX_ERROR_CODES + 1
    assert sum(metrics.http_errors.values()) == MAX_ERROR_CODES * 2 + 1
    assert metrics.http_errors["queue_full"] == 1
