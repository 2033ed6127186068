"""The ladder of graphs, and that a tape stands in for a graph: it sees device memory alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu.graphs import GraphLadder, ladder
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


def test_every_batch_size_finds_the_smallest_graph_that_holds_it() -> None:
    graphs = GraphLadder([1, 2, 4, 8])
    assert [graphs.size_for(rows) for rows in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]


def test_a_real_ladder_wastes_at_most_seven_rows() -> None:
    graphs = GraphLadder(ladder(256))
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

    def run(self, rows: int) -> None:
        tokens = torch.empty(rows, dtype=torch.int64)
        self._gather.launch(self.slots, self.positions, tokens)
        x = torch.nn.functional.embedding(tokens, self.embedding)
        self.out[:rows] = x.view(-1).mul(self.factor).view(rows, 2)


@pytest.fixture
def taped(loader: KernelLoader) -> TapedLoader:
    if loader.device.type != "cpu":
        pytest.skip("a GPU captures graphs of its own")
    return TapedLoader(loader)


def test_a_replay_reads_device_memory_and_nothing_else(taped: TapedLoader) -> None:
    work = Doubling(taped)
    graphs = GraphLadder([2, 4])
    captured = []
    graphs.capture(TapeCapturer(taped), work.run, lambda: captured.append(taped.num_launches))
    assert captured == [2, 4]  # each size ran once to warm up and once to be captured
    work.slots[:3] = torch.tensor([3, 0, -1])
    work.positions[:3] = torch.tensor([5, 9, 0])
    work.factor = 1000.0
    work.out.fill_(-1)
    graphs.replay(4)
    np.testing.assert_array_equal(work.out[:, 0], [270, 218, 0, 200, -1, -1, -1, -1])
    work.history[3, 5] = 7
    graphs.replay(2)
    np.testing.assert_array_equal(work.out[:, 0], [14, 218, 0, 200, -1, -1, -1, -1])


def test_a_number_that_python_looks_at_spoils_a_capture(taped: TapedLoader) -> None:
    with pytest.raises(RuntimeError, match="while capturing"):
        TapeCapturer(taped).capture(lambda: assert_positive(torch.ones(1)))


def assert_positive(x: torch.Tensor) -> None:
    assert x.sum() > 0
