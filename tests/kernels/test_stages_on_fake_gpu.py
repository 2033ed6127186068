"""Two stages over the code of a real GPU: whatever its queue hasn't done yet, states arrive whole.

Both stages are of one thread and on one GPU. The second one computes a step when the first one has
sent all of it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy.typing as npt
import pytest

from gpu.cpu.torch_model import TorchSampler
from gpu.cuda.assembly import slot_table
from gpu.cuda.following import follow
from gpu.cuda.leading_stage import LeadingCudaExecutor, LeadingCudaStage
from gpu.cuda.ranks import CudaRank, decode_rank_step
from gpu.cuda.stage_forward import StageForward
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Alone
from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.stages import stages_of
from gpu.models.parallel.steps import ReturnResults
from gpu.runner import Runner
from gpu.sampling.sampler import Sampler
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.flights import Flight
from tests.kernels.serving import open_follower, serving_limits
from tests.kernels.test_ranks_on_fake_gpu import PlayedLink
from tests.kernels.test_steps_on_fake_gpu import PROMPTS, SEEDED, VOCAB
from tests.kernels.test_whole_model import make_model
from trioserve.model_files import open_model

FLIGHT = Flight(
    opened={0: {"tokens": PROMPTS[0]}, 1: {"tokens": PROMPTS[1], "params": SEEDED}},
    plans=[{0: 30}, {0: 36, 1: 5}, {}, *[{0: 1}, {1: 1}] * 3],
    copied_in=2,
)
Arrays = queue.SimpleQueue[npt.NDArray[Any]]


class QueuedWay(StageLink):
    """The way from one of two stages to the other, and back."""

    def __init__(
        self, stage: int, before: Arrays, behind: Arrays, sent: Callable[[], None]
    ) -> None:
        super().__init__(stage, 1, 2, [])
        self._before, self._behind, self._sent = before, behind, sent

    def send(self, numbers: npt.NDArray[Any]) -> None:
        self._behind.put(numbers.copy())
        self._sent()

    def receive(self, into: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if into.size:
            into[...] = self._before.get(timeout=60)
        return into


class QueuedLink(PlayedLink):
    """The messages of rank 0, which are played to the other rank."""

    def __init__(self, rank: int, stages: StageLink) -> None:
        super().__init__(rank, [])
        self.stages = stages

    def send(self, message: bytes) -> None:
        self._messages.append(message)


def open_stage(folder: Path, gpu: FakeGpu, rank: CudaRank) -> StageForward:
    """Return the forward pass of a stage, with its graphs."""
    forward, _ = open_follower(folder, gpu.loader, lambda _: rank, num_host_pages=2)
    assert isinstance(forward, StageForward)
    return forward


def open_stages(folder: Path, gpu: FakeGpu) -> Any:
    """Return a server of two stages for a flight."""
    there, back = Arrays(), Arrays()

    def follow_results() -> None:
        messages = links[0]._messages
        if isinstance(decode_rank_step(messages[-1]), ReturnResults):
            links[1]._messages.extend(messages)
            messages.clear()
            with pytest.raises(EOFError):
                follow(links[1], second)

    ways = [
        QueuedWay(0, back, there, follow_results),
        QueuedWay(1, there, back, lambda: None),
    ]
    links = [QueuedLink(number, way) for number, way in enumerate(ways)]
    config = open_model(folder).native
    ranks = [
        CudaRank(link, Alone(), ModelPart(config, 0, 1, stage=stage))
        for link, stage in zip(links, stages_of(config, 2), strict=True)
    ]
    first, second = [open_stage(folder, gpu, rank) for rank in ranks]
    slots = slot_table(serving_limits(num_host_pages=2), VOCAB)
    leading = LeadingCudaStage(first, ranks[0], None)
    sampler = TorchSampler(Sampler(VOCAB, "cpu"))
    executor = LeadingCudaExecutor(leading, sampler, slots, links[0], config.hidden_size)
    return SimpleNamespace(runner=Runner(executor, slots, max_num_batched_tokens=128))


def test_results_are_the_same_however_far_the_queue_lags(
    gpu: FakeGpu, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = open_stages(make_model("llama", tmp_path_factory), gpu)
    expected = FLIGHT.run(server, in_flight=1)
    assert [len(result.tokens) // 4 for result in expected] == [0, 2, 0, *[1] * 6]
    for seed, pace in enumerate((0.0, 0.3)):
        gpu.queue.restart(seed, pace, None)
        assert FLIGHT.run(server, in_flight=2) == expected, pace
