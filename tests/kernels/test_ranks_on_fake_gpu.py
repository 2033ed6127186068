"""Two ranks over the code of a real GPU: what they exchange is queued, and captured with the rest.

Both ranks run at once on CPUs first, which notes what each brings to every exchange. Then each
runs alone on a GPU whose queue lags behind, and is given what the other one brought.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch

from gpu.cuda.following import follow
from gpu.cuda.ranks import CudaRank, SoleRank
from gpu.kernels.emulation import EmulatedLoader
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Ranks
from tests.kernels.fake_cuda.gpu import FakeGpu
from tests.kernels.fake_cuda.memory import plain_torch
from tests.kernels.flights import Flight
from tests.kernels.serving import open_follower
from tests.kernels.tape import TapedLoader, TapedRanks
from tests.kernels.test_steps_on_fake_gpu import FLIGHTS, PACES, flight_of, restart, tokens
from tests.kernels.test_whole_model import make_model
from tests.support.thread_ranks import ThreadLink, links_of, on_ranks
from trioserve.model_files import open_model
from trioserve.protocol.wire import StepResult

SIZE = 2


@attrs.define
class Recorded:
    """Tensors that a rank brought to each exchange once it had its graphs, and its messages."""

    brought: list[tuple[str, torch.Tensor]] = attrs.field(factory=list)
    messages: list[bytes] = attrs.field(factory=list)
    on: bool = False


class RecordedRanks:
    """:class:`gpu.models.parallel.ranks.Ranks` that notes what this rank brings."""

    def __init__(self, inner: Ranks, into: Recorded) -> None:
        self._inner, self._into = inner, into

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_reduce(self._noted("all_reduce", x))

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.broadcast(self._noted("broadcast", x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(self._noted("all_gather", x))

    def _noted(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self._into.on:
            self._into.brought.append((name, x.clone()))
        return x


class QueuedRanks:
    """:class:`gpu.models.parallel.ranks.Ranks` whose exchanges are queued, as NCCL's are.

    ``others`` is what the other rank brings. While it is empty, that is nothing.
    """

    def __init__(self, gpu: FakeGpu, rank: int) -> None:
        self._gpu, self._rank = gpu, rank
        self.others: deque[tuple[str, torch.Tensor]] = deque()
        self.brought: list[tuple[str, torch.Tensor]] = []
        self.captured = Counter[str]()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("all_reduce", x, x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("broadcast", x, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("all_gather", x, torch.cat([x] * SIZE, dim=1))

    def _exchange(self, name: str, x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        queue, memory = self._gpu.queue, self._gpu.memory
        own, target = memory.alias(x), memory.alias(into)
        self.captured[name] += queue.captures

        def run() -> None:
            with plain_torch():
                if self.others:
                    expected, other = self.others.popleft()
                    assert (expected, other.shape) == (name, own.shape)
                    self.brought.append((name, own.clone()))
                    target.copy_(self._joined(name, own, other))

        queue.queue(queue.current, name, run)
        return into

    def _joined(self, name: str, own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first, second = (own, other) if self._rank == 0 else (other, own)
        if name == "all_reduce":
            return first + second
        return first if name == "broadcast" else torch.cat([first, second], dim=1)


class PlayedLink(RankLink):
    """Messages of rank 0 that were noted; then it has ended."""

    def __init__(self, rank: int, messages: list[bytes]) -> None:
        super().__init__(rank, [])
        self._messages = deque(messages)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        yield

    def receive(self) -> bytes:
        if not self._messages:
            raise EOFError
        return self._messages.popleft()


class DrainedLink(PlayedLink):
    """Messages that come when the GPU has done all its work."""

    def __init__(self, rank: int, messages: list[bytes], gpu: FakeGpu) -> None:
        super().__init__(rank, messages)
        self._gpu = gpu

    def receive(self) -> bytes:
        self._gpu.queue.drain("between two steps")
        return super().receive()


class NotedLink(ThreadLink):
    """Rank 0's link, which notes its messages."""

    def __init__(self, link: ThreadLink, into: Recorded) -> None:
        super().__init__(0, link._sockets)
        self._into = into

    def send(self, message: bytes) -> None:
        if self._into.on:
            self._into.messages.append(message)
        super().send(message)


def part(folder: Path, rank: int) -> ModelPart:
    return ModelPart(open_model(folder).native, rank, SIZE)


def run_together(flight: Flight, folder: Path) -> tuple[list[StepResult], list[Recorded]]:
    """Run a flight on two ranks that are threads; its results, and what they exchanged."""
    links, recorded = links_of(SIZE), [Recorded(), Recorded()]
    links[0] = NotedLink(links[0], recorded[0])
    adapters = flight.options.get("adapters", ())

    def run(number: int, ranks: Ranks) -> list[StepResult]:
        def make_rank(loader: TapedLoader) -> SoleRank:
            noted = RecordedRanks(ranks, recorded[number])
            return CudaRank(links[number], TapedRanks(noted, loader), part(folder, number))

        try:
            if number == 0:
                server = flight.serve(folder, EmulatedLoader(), make_rank=make_rank)
                recorded[0].on = True
                return flight.run(server, in_flight=1)
            forward, store = open_follower(
                folder, EmulatedLoader(), make_rank, adapters=adapters, num_host_pages=2
            )
            recorded[1].on = True
            with contextlib.suppress(EOFError):
                follow(links[number], forward, store)
            return []
        finally:
            links[number].close()

    return on_ranks(SIZE, run)[0], recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory)


@pytest.fixture(scope="module", params=FLIGHTS)
def flight(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Flight:
    return flight_of(request.param, folder, tmp_path_factory)


@pytest.fixture(scope="module")
def together(flight: Flight, folder: Path) -> tuple[list[StepResult], list[Recorded]]:
    return run_together(flight, folder)


def test_rank_0_gives_the_same_however_far_its_queue_lags(
    flight: Flight,
    folder: Path,
    together: tuple[list[StepResult], list[Recorded]],
    gpu: FakeGpu,
) -> None:
    results, recorded = together
    ranks = QueuedRanks(gpu, 0)
    rank = CudaRank(PlayedLink(0, []), ranks, part(folder, 0))
    server = flight.serve(folder, gpu.loader, make_rank=lambda _: rank)
    layers, captured = open_model(folder).native.num_layers, ranks.captured
    assert captured["broadcast"] == captured["all_gather"] > 0
    assert captured["all_reduce"] == captured["broadcast"] * (2 * layers + 1)

    def run(in_flight: int) -> list[StepResult]:
        ranks.others.extend(recorded[1].brought)
        found = flight.run(server, in_flight=in_flight)
        assert not ranks.others
        return found

    expected = run(1)
    assert tokens(expected) == tokens(results)
    for seed, pace in enumerate(PACES):
        restart(gpu, seed, *pace)
        assert run(2) == expected, pace
        assert not gpu.queue.stalls, pace


def test_another_rank_brings_the_same_however_far_its_queue_lags(
    flight: Flight,
    folder: Path,
    together: tuple[list[StepResult], list[Recorded]],
    gpu: FakeGpu,
) -> None:
    _, recorded = together
    ranks = QueuedRanks(gpu, 1)
    rank = CudaRank(PlayedLink(1, []), ranks, part(folder, 1))
    options = {"adapters": flight.options.get("adapters", ()), "num_host_pages": 2}
    forward, store = open_follower(folder, gpu.loader, lambda _: rank, **options)

    def run(each: PlayedLink) -> list[tuple[str, torch.Tensor]]:
        ranks.others.extend(recorded[0].brought)
        if forward.adapters is not None:  # rank 0 had none on its device at first
            forward.adapters._adapter_slots._slots.clear()
        with contextlib.suppress(EOFError):
            follow(each, forward, store)
        gpu.queue.drain("the end")
        assert not ranks.others
        found, ranks.brought = ranks.brought, []
        return found

    expected = run(DrainedLink(1, recorded[0].messages, gpu))
    assert len(expected) == len(recorded[1].brought)
    for seed, pace in enumerate(PACES):
        restart(gpu, seed, *pace)
        found = run(PlayedLink(1, recorded[0].messages))
        assert all(map(same, found, expected)), pace


def same(one: tuple[str, torch.Tensor], other: tuple[str, torch.Tensor]) -> bool:
    """Compare bits, as rows of padding may have NaN."""
    return one[0] == other[0] and torch.equal(one[1].view(torch.uint8), other[1].view(torch.uint8))
