"""Two plans in flight over the code of a real GPU, whose queue lags behind by what a seed says.

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

from gpu.cuda import step_buffer, timeline
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.step import CudaStep
from gpu.cuda.step_buffer import StepBuffer
from gpu.cuda.timeline import CudaTimeline
from gpu.emulation import EmulatedLoader
from gpu.kernels import KernelLoader
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.serving import NUM_PAGES, PAGE_SIZE, Server
from tests.plans import PlanMaker
from tests.tiny_models import make_tiny
from trioserve.sampling import SamplerParams
from trioserve.wire import StepResult, ints

GREEDY = SamplerParams(temperature=0.0, logprobs=2)
SEEDED = SamplerParams(temperature=0.8, top_k=40, seed=1234, logit_bias={17: 2.0, 250: -3.0})
PROMPTS = [[(7 * i * i + 3 * i + 11 * k) % 300 for i in range(n)] for k, n in enumerate((66, 5))]
# In the order of how far the device lags behind: as far as it can, or hardly.
PACES = [0.0, 0.02, 0.05, 0.1, 0.3, 0.6]
SEEDS = range(12)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return make_tiny("llama3", folder, head_dim=64, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[StepResult]:
    """What a device gives that does its work when it is called."""
    return run(serve(llama, EmulatedLoader()), in_flight=1)


def outcome(result: StepResult) -> StepResult:
    """A result without its times."""
    return attrs.evolve(result, step_us=0, gap_us=0, idle_us=0, launch_us=0)


def run(server: Server, *, in_flight: int = 2) -> list[StepResult]:
    """Run a few plans: a prompt in pieces, pages that go to the host and back, graphs, a gap."""
    server.runner.reset(1)
    maker = PlanMaker(server.runner.step, page_size=PAGE_SIZE, num_pages=NUM_PAGES)
    server.maker = maker
    maker.open(0, PROMPTS[0], GREEDY, prompt_logprobs_from=1)
    maker.open(1, PROMPTS[1], SEEDED)
    both = {0: 1, 1: 1}
    results = []
    for rows in [{0: 30, 1: 5}, {0: 36, 1: 1}, both, both, {1: 1}, {}, both, both, both]:
        if maker.number == 2:
            first, second = maker.slots[0].pages[:2]
            maker.copies += [(first, NUM_PAGES), (second, first), (NUM_PAGES, first)]
        server.runner.submit(maker.plan(rows))
        if server.runner.num_pending == in_flight:
            results.append(server.runner.finish())
            maker.accept(results[-1])
    while server.runner.num_pending:
        results.append(server.runner.finish())
        maker.accept(results[-1])
    return [outcome(result) for result in results]


def tokens(results: list[StepResult]) -> list[list[int]]:
    return [ints(result.tokens).tolist() for result in results]


def serve(folder: Path, loader: KernelLoader) -> Server:
    return Server.of(folder, loader, graphs=True, num_host_pages=2)


def test_two_plans_in_flight_give_what_one_gives(
    llama: Path, plain: list[StepResult], gpu: FakeGpu
) -> None:
    server = serve(llama, gpu.loader)
    expected = run(server, in_flight=1)
    assert tokens(expected) == tokens(plain)
    for seed in SEEDS:
        gpu.queue.restart(seed, PACES[seed % len(PACES)])
        assert run(server) == expected, seed
        assert not gpu.queue.stalls, seed


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
    monkeypatch.setattr(timeline.Completions, "take", lambda self: None)
    event = torch.cuda.Event
    monkeypatch.setattr(event, "synchronize", lambda self: None)
    monkeypatch.setattr(event, "elapsed_time", lambda self, end: 0.0)


def reports_dropped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    end = CudaExecutor._end

    def end_and_drop(self: CudaExecutor, step: CudaStep) -> Any:
        ending = end(self, step)
        step.reports.clear()
        return ending

    monkeypatch.setattr(CudaExecutor, "_end", end_and_drop)


def memory_that_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.upload.pinned", lambda host, device: host)


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
    expected = run(serve(llama, gpu.loader), in_flight=1)
    mistake(monkeypatch)
    server = serve(llama, gpu.loader)
    seen = set()
    for seed in SEEDS:
        gpu.queue.restart(seed, PACES[seed % len(PACES)])
        try:
            seen.add("as expected" if run(server) == expected else "another result")
        except RuntimeError as error:
            seen.add(str(error))
        seen |= gpu.queue.stalls.keys()
        if noticed in seen:
            break
    assert noticed in seen
