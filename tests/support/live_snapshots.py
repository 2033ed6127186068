"""Pictures of a server, for tests of what shows them."""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.observability.live.schema import (
    Counts,
    Hello,
    Latency,
    Pages,
    Prefix,
    Quantiles,
    Rates,
    RequestRow,
    Snapshot,
    TaskNode,
    WorkerRates,
    WorkerRow,
    WorkerState,
)

__all__ = ["NOW", "hello", "row", "snapshot", "some_rows", "some_workers", "worker"]

NOW = 1_800_000_000.0


def hello(**changes: Any) -> Hello:
    usual = Hello(
        model="smollm2-135m",
        version="0.1.0",
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=256,
        page_size=16,
        device="cpu",
        started=NOW - 3725,
        front_ends=1,
        may_control=False,
        lora=[],
    )
    return msgspec.structs.replace(usual, **changes)


def row(number: int, state: str = "decode", **changes: Any) -> RequestRow:
    usual = RequestRow(
        id=f"chatcmpl-{number}",
        state=state,
        finish_reason=None,
        prompt_tokens=100 * number,
        cached_tokens=16,
        computed_tokens=100 * number,
        output_tokens=10 * number,
        max_tokens=100,
        outputs=1,
        pages=7 * number,
        priority=0,
        adapter=None,
        timeline=[("tokenizing", NOW - 10 * number), (state, NOW - 5 * number)],
    )
    return msgspec.structs.replace(usual, **changes)


def some_rows() -> list[RequestRow]:
    return [
        row(1, "waiting", output_tokens=0, pages=0),
        row(2, "prefill", computed_tokens=100, output_tokens=0),
        row(3),
        row(4, "finished", finish_reason="abort"),
    ]


def worker(index: int, state: str = "running", **changes: Any) -> WorkerRow:
    usual = WorkerRow(
        index=index,
        state=state,
        device="NVIDIA H200",
        pid=4242 + index,
        restarts=0,
        since=NOW - 3720,
        last_loss=None,
        running=index,
        waiting=1,
        decode_ms=11.3,
        pages=Pages(total=1000, free=500, cached=200, held=300, host_total=0, host_used=0),
        rates=WorkerRates(
            generated_tokens_per_s=200.0 + index,
            prompt_tokens_per_s=1203.0,
            steps_per_s=98.0,
            gpu_idle_share=0.12,
            step_ms=9.84,
            batch_rows=2.5,
        ),
    )
    return msgspec.structs.replace(usual, **changes)


def some_workers() -> list[WorkerRow]:
    """Return four workers, of which the third was lost."""
    lost = worker(
        2,
        "restarting",
        pid=None,
        restarts=1,
        since=NOW - 12,
        last_loss="process 4244 was killed by signal 9",
        running=0,
        waiting=0,
        pages=Pages(total=1000, free=1000, cached=0, held=0, host_total=0, host_used=0),
        rates=WorkerRates(),
    )
    return [worker(0), worker(1), lost, worker(3)]


def snapshot(after: float = 0.0, **changes: Any) -> Snapshot:
    """Return a snapshot taken ``after`` so many seconds."""
    usual = Snapshot(
        now=NOW + after,
        health="ok",
        paused=False,
        weight_version="default",
        worker=WorkerState(
            pid=4242, state="running", restarts=0, since=NOW - 3720, last_death=None
        ),
        counts=Counts(
            tokenizing=0,
            waiting=1,
            running=2,
            preempted=0,
            streams=3,
            sessions=0,
            finished_total=12345,
            aborted_total=6,
            errors_total=0,
        ),
        pages=Pages(total=1000, free=500, cached=200, held=300, host_total=0, host_used=0),
        rates=Rates(
            generated_tokens_per_s=812.3,
            prompt_tokens_per_s=1203.0,
            requests_per_s=3.1,
            steps_per_s=98.0,
            gpu_idle_share=0.12,
            step_ms=9.84,
            batch_rows=2.5,
            cache_hit_share=0.25,
        ),
        latency=Latency(
            ttft=Quantiles(0.061, 0.1, 1.25), itl=Quantiles(0.0098, 0.012, 0.013), queue=None
        ),
        requests=some_rows(),
        num_requests_left_out=0,
        prefix=Prefix(nodes=[], num_left_out=0),
        tasks=TaskNode(
            name="run_server",
            state="waiting",
            children=[
                TaskNode(name="Scheduler.run", state="ready"),
                TaskNode(
                    name="listen",
                    state="waiting",
                    children=[TaskNode(name="connection", state="waiting", count=3)],
                    num_left_out=9,
                ),
            ],
        ),
        steps=[],
    )
    return msgspec.structs.replace(usual, **changes)
