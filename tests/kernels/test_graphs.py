"""The ladder of graphs, and that a tape stands in for a graph: it sees device memory alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu.cuda.graphs import GraphLadder, ladder, sharing_ladder
from gpu.kernels import KernelLoader
from gpu.kernels.gather_tokens import GatherTokens
from tests.kernels.tape import TapeCapturer, TapedLoader


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_ladder(max_rows: int, sizes: list[int]) -> None:
    assert ladder(max_rows) == sizes


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, [1]), (6, [6]), (8, [8]), (9, [8, 9]), (100, [8, 16, 32, 64, 100])]
)
def test_ladder_of_steps_with_shared_prefixes(max_rows: int, sizes: list[int]) -> None:
    assert sharing_ladder(max_rows) == sizes


class NoCapturer:
    """Captures nothing, in order."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self.results.append(work())
        return None, self.results[-1]


def captured(sizes: list[int]) -> tuple[GraphLadder, list[Any]]:
    graphs, capturer = GraphLadder(), NoCapturer()
    graphs.capture(
        capturer,
        sizes,
        prepare=lambda size: capturer.results.append(f"prepare {size}"),
        forward=lambda size: -size,
        sample=lambda size, result: (size, result),  # type: ignore[arg-type,return-value]
        on_captured=lambda: capturer.results.append("captured"),
    )
    return graphs, capturer.results


def test_a_ladder_without_graphs_holds_nothing() -> None:
    assert GraphLadder().size_for(1) is None


def test_the_largest_is_captured_first_and_sampling_gets_what_forward_gave() -> None:
    _, results = captured([1, 4, 2])
    assert results == [
        step for size in (4, 2, 1) for step in (f"prepare {size}", -size, (size, -size), "captured")
    ]


def test_every_batch_size_finds_the_smallest_graph_that_holds_it() -> None:
    graphs, _ = captured([1, 2, 4, 8])
    assert [graphs.size_for(rows) for rows in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]


def test_a_real_ladder_wastes_at_most_seven_rows() -> None:
    graphs, _ = captured(ladder(256))
    assert max((graphs.size_for(rows) or 0) - rows for rows in range(1, 257)) == 7


class Doubling:
    """Work on a loader: gathers tokens, looks them up, and doubles what it finds."""

    def __init__(self, loader: TapedLoader) -> None:
        self.history = torch.arange(100, 140, dtype=torch.int32).view(4, 10)
        self.slots = torch.zeros(8, dtype=torch.int32)
        self.positions = torch.zeros(8, dtype=torch.int32)
        self.embedding = torch.arange(300, dtype=torch.float32)[:, None].repeat(1, 2)
        self.out = torch.zeros(8, 2)
        self.factor = 2.0
        self._gather = GatherTokens(loader, history=self.history)

    def forward(self, rows: int) -> torch.Tensor:
        tokens = torch.empty(rows, dtype=torch.int64)
        self._gather.launch(self.slots, self.positions, tokens)
        x = torch.nn.functional.embedding(tokens, self.embedding)
        return x.view(-1).mul(self.factor).view(rows, 2)

    def sample(self, rows: int, x: torch.Tensor) -> None:
        self.out[:rows] = x + 1


@pytest.fixture
def taped(loader: KernelLoader) -> TapedLoader:
    if loader.device.type != "cpu":
        pytest.skip("a GPU captures graphs of its own")
    return TapedLoader(loader)


def test_a_replay_reads_device_memory_and_nothing_else(taped: TapedLoader) -> None:
    work, graphs = Doubling(taped), GraphLadder()
    launches = []
    graphs.capture(
        TapeCapturer(taped),
        [2, 4],
        prepare=lambda size: None,
        forward=work.forward,
        sample=work.sample,
        on_captured=lambda: launches.append(taped.num_launches),
    )
    assert launches == [2, 4]  # each size ran once to warm up and once to be captured
    work.slots[:3] = torch.tensor([3, 0, -1])
    work.positions[:3] = torch.tensor([5, 9, 0])
    work.factor = 1000.0
    work.out.fill_(-1)
    graphs.replay_forward(4)
    assert bool((work.out == -1).all())
    graphs.replay_sampling(4)
    assert work.out[:, 0].tolist() == [271, 219, 1, 201, -1, -1, -1, -1]
    work.history[3, 5] = 7
    graphs.replay_forward(2)
    graphs.replay_sampling(2)
    assert work.out[:, 0].tolist() == [15, 219, 1, 201, -1, -1, -1, -1]


def test_a_number_that_python_looks_at_spoils_a_capture(taped: TapedLoader) -> None:
    with pytest.raises(RuntimeError, match="while capturing"):
        TapeCapturer(taped).capture(lambda: bool(torch.ones(1).sum() > 0))
