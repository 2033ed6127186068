"""Two plans in flight over the code of a real GPU; a seed decides how far its queue lags behind.

The tokens, their log-probabilities and those of a prompt are bit for bit those of one plan after
the other, and the host never waits for the device but for a result. Planted mistakes of order, of
buffers and of waits show in one or the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from gpu._util.completions import Completions
from gpu.cuda import step_buffer, timeline
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.step import CudaStep
from gpu.cuda.step_buffer import StepBuffer
from gpu.cuda.timeline import CudaTimeline
from gpu.kernels.emulation import EmulatedLoader
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.flights import Flight
from tests.support.adjusters import ToyAdjuster, chained
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_models import make_tiny
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import StepResult, ints

GREEDY = SamplerParams(temperature=0.0)
SEEDED = SamplerParams(temperature=0.8, top_k=40, seed=1234, logit_bias={17: 2.0, 250: -3.0})
VOCAB = 300
PROMPTS = [
    [(7 * i * i + 3 * i + 11 * k) % VOCAB for i in range(length)]
    for k, length in enumerate((66, 5, 12, 17))
]
# How soon the device does what it need not do yet (never, now and then, nearly at once), and if
# the stream of the outputs does so, too.
PACES = [(0.0, True), (0.05, True), (0.3, True), (0.6, True), (0.3, False), (1.0, False)]
FLIGHTS = ["plain", "pooled", "adapted", "adjusted"]
BOTH = {0: 1, 1: 1}
ALL = dict.fromkeys(range(3), 1)

PLAIN = Flight(
    opened={
        0: {
            "tokens": PROMPTS[0],
            "params": attrs.evolve(GREEDY, logprobs=2, logprob_token_ids=[5, 7]),
            "prompt_logprobs_from": 1,
        },
        1: {"tokens": PROMPTS[1], "params": SEEDED},
    },
    plans=[{0: 30, 1: 5}, {0: 36, 1: 1}, BOTH, BOTH, {1: 1}, {}, BOTH, BOTH, BOTH],
    copied_in=2,
)
POOLED = Flight(
    opened={
        0: {"tokens": PROMPTS[0], "params": attrs.evolve(GREEDY, pooling="mean")},
        1: {
            "tokens": PROMPTS[1],
            "params": attrs.evolve(GREEDY, generation_logits=True),
            "context_logits_from": 2,
        },
        2: {"tokens": PROMPTS[2], "params": attrs.evolve(GREEDY, pooling="last")},
        3: {"tokens": PROMPTS[3], "states_from": 3},
    },
    plans=[{0: 30, 1: 5}, {0: 35, 1: 1, 2: 12}, {0: 1, 1: 1, 3: 17}, {1: 1}, {1: 1, 3: 1}, {1: 1}],
)


def adapted(folder: Path, where: Path) -> Flight:
    """Three adapters, of which two have room on the device."""
    paths = [make_adapter(folder, where / str(n), seed=n, rank=3 * n) for n in (1, 2, 3)]
    return Flight(
        opened={slot: {"tokens": PROMPTS[slot], "adapter": slot} for slot in range(4)},
        plans=[
            {0: 66, 1: 5, 2: 12},
            *[ALL] * 2,
            {0: 1, 2: 1, 3: 17},
            *[{2: 1, 3: 1}, {1: 1, 3: 1}] * 2,
        ],
        options={"adapters": paths},
    )


def adjusted() -> Flight:
    """Masks that need the last token, so that draws are deferred."""
    params = [chained(GREEDY), SEEDED, attrs.evolve(GREEDY, extra_args={"bias": 100.0})]
    return Flight(
        opened={slot: {"tokens": PROMPTS[slot], "params": params[slot]} for slot in range(3)},
        plans=[{0: 66, 1: 5}, {0: 1, 1: 1, 2: 12}, *[ALL] * 3, {1: 1, 2: 1}, *[ALL] * 2],
        options={"adjuster": ToyAdjuster(VOCAB)},
    )


def flight_of(kind: str, folder: Path, factory: pytest.TempPathFactory) -> Flight:
    """Return one of :data:`FLIGHTS`."""
    if kind == "adapted":
        return adapted(folder, factory.mktemp("adapters"))
    return {"plain": PLAIN, "pooled": POOLED, "adjusted": adjusted()}[kind]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_tiny("llama3", folder, head_dim=64, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module", params=FLIGHTS)
def flight(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Flight:
    return flight_of(request.param, llama, tmp_path_factory)


@pytest.fixture(scope="module")
def done_at_once(flight: Flight, llama: Path) -> list[StepResult]:
    """The results of a device that does its work at once when it is called."""
    return flight.run(flight.serve(llama, EmulatedLoader()), in_flight=1)


def tokens(results: list[StepResult]) -> list[list[int]]:
    return [ints(result.tokens).tolist() for result in results]


def restart(gpu: FakeGpu, seed: int, pace: float, outputs_too: bool) -> None:
    outputs = gpu.queue.streams[-1]  # the timeline's, which is made last
    gpu.queue.restart(seed, pace, None if outputs_too else outputs)


def test_two_plans_in_flight_give_what_one_gives(
    flight: Flight, llama: Path, done_at_once: list[StepResult], gpu: FakeGpu
) -> None:
    server = flight.serve(llama, gpu.loader)
    expected = flight.run(server, in_flight=1)
    assert tokens(expected) == tokens(done_at_once)
    for seed, pace in enumerate(PACES):
        restart(gpu, seed, *pace)
        assert flight.run(server, in_flight=2) == expected, pace
        assert not gpu.queue.stalls, pace


def one_host_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffer, "NUM_HOST_BUFFERS", 1)


def one_host_buffer_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    one_host_buffer(monkeypatch)
    upload = StepBuffer.upload

    def upload_only(self: StepBuffer) -> None:
        self._on_gpu = False
        upload(self)

    monkeypatch.setattr(StepBuffer, "upload", upload_only)


def sampling_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_sampling(self: CudaTimeline) -> None:
        self._marking.begin_kernels()

    monkeypatch.setattr(CudaTimeline, "begin_sampling", begin_sampling)


def copies_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwaited:
        def wait(self) -> None:
            pass

        def elapsed_time(self, end: Any) -> float:
            return 0.0

    monkeypatch.setattr(timeline, "_timed_event", Unwaited)


def results_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Completions, "take", lambda self: None)
    event = torch.cuda.Event
    monkeypatch.setattr(event, "synchronize", lambda self: None)
    monkeypatch.setattr(event, "elapsed_time", lambda self, end: 0.0)


def reports_dropped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    end = CudaExecutor.draw

    def end_and_drop(self: CudaExecutor, step: CudaStep) -> Any:
        ending = end(self, step)
        step.reports.clear()
        return ending

    monkeypatch.setattr(CudaExecutor, "draw", end_and_drop)


def memory_that_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu._util.upload.pinned", lambda host, device: host)


def events_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    def untimed() -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    monkeypatch.setattr(timeline, "_timed_event", untimed)


@pytest.mark.parametrize(
    ("mistake", "noticed"),
    [
        (one_host_buffer, "cudaEventSynchronize"),
        (one_host_buffer_and_no_wait, "another result"),
        (sampling_without_a_wait, "another result"),
        (copies_without_a_wait, "another result"),
        (results_read_early, "another result"),
        (reports_dropped_early, "another result"),
        (memory_that_is_not_locked, "cudaMemcpyAsync of memory that isn't page-locked"),
        (events_without_timing, "cudaEventElapsedTime of an event without timing"),
    ],
)
def test_a_planted_mistake_is_noticed(
    llama: Path,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[pytest.MonkeyPatch], None],
    noticed: str,
) -> None:
    expected = PLAIN.run(PLAIN.serve(llama, gpu.loader), in_flight=1)
    mistake(monkeypatch)
    server = PLAIN.serve(llama, gpu.loader)
    seen = set()
    for seed, pace in enumerate(PACES):
        restart(gpu, seed, *pace)
        try:
            same = PLAIN.run(server, in_flight=2) == expected
            seen.add("as expected" if same else "another result")
        except RuntimeError as error:
            seen.add(str(error))
        seen |= gpu.queue.stalls.keys()
        if noticed in seen:
            break
    assert noticed in seen
