"""The adapters' kernels against float64; a row's result doesn't depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.kernels import KernelLoader
from gpu.kernels.lora import (
    COLUMNS,
    ENTRY,
    SPLIT,
    TILE,
    LoraUpdate,
    ProductShape,
    max_tiles,
    padded_rank,
)
from tests.kernels.memory import place, poisoned, relative_error
from tests.kernels.rounding import share_rounded_otherwise

pytestmark = pytest.mark.every_arithmetic

ROUNDING = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
Ranks = tuple[int, ...]


@attrs.frozen(eq=False)
class Problem:
    """A product, and adapters for it: ``matrices`` are those of adapter and part."""

    shape: ProductShape
    matrices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
    num_adapters: int
    max_rank: int
    owners: list[int]  # -1: the token has no adapter
    x: torch.Tensor
    y: torch.Tensor

    @classmethod
    def of(
        cls,
        shape: ProductShape,
        ranks: Sequence[Ranks],
        owners: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> Problem:
        """Random numbers. ``ranks`` are each adapter's by part, 0 for a part without an update."""
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator)

        matrices = {
            (adapter, part): (
                (random(rank, shape.inputs) / shape.inputs**0.5).to(dtype),
                (random(outputs, rank) / rank**0.5).to(dtype),
            )
            for adapter, own in enumerate(ranks)
            for part, (rank, outputs) in enumerate(zip(own, shape.outputs, strict=True))
            if rank
        }
        return cls(
            shape,
            matrices,
            len(ranks),
            max((rank for own in ranks for rank in own), default=1) or 1,
            list(owners),
            random(len(owners), shape.inputs).to(dtype),
            random(len(owners), sum(shape.outputs)).to(dtype),
        )

    def exact(self) -> torch.Tensor:
        """Return what ``y`` is to become, in float64."""
        result = self.y.double()
        for token, adapter in enumerate(self.owners):
            first = 0
            for part, outputs in enumerate(self.shape.outputs):
                if (adapter, part) in self.matrices:
                    a, b = (matrix.double() for matrix in self.matrices[adapter, part])
                    result[token, first : first + outputs] += b @ (a @ self.x[token].double())
                first += outputs
        return result

    def alone(self, token: int) -> Problem:
        """Return the problem with one of the tokens only."""
        own = slice(token, token + 1)
        return attrs.evolve(self, owners=self.owners[own], x=self.x[own], y=self.y[own])

    def run(self, loader: KernelLoader, *, more_tiles: int = 0) -> torch.Tensor:
        """``y`` afterwards, with so many tiles behind the last that are none."""
        dtype = self.x.dtype
        entries = np.zeros(
            (self.num_adapters, 2), ENTRY
        )  # the first of two products has no adapter
        rank = padded_rank(self.max_rank)
        size = rank * sum(self.shape.inputs + outputs for outputs in self.shape.outputs)
        places = poisoned((self.num_adapters, size), dtype, loader)
        for adapter in range(self.num_adapters):
            self._fill(adapter, entries[adapter, 1], places[adapter])
        tokens, tiles = self._tiles()
        tiles += [0] * (3 * more_tiles)
        update = LoraUpdate(
            loader,
            shapes=[self.shape],
            places=places,
            entries=place(torch.from_numpy(entries.view(np.int64).reshape(-1, 2, 4)), loader),
            tiles=place(torch.tensor(tiles, dtype=torch.int32), loader),
            tokens=place(torch.tensor(tokens, dtype=torch.int32), loader),
            max_rank=self.max_rank,
        )
        update._partial.fill_(float("nan"))
        x, y = place(self.x, loader), place(self.y, loader)
        update.launch(1, self.shape, len(tiles) // 3, x, y)
        assert torch.equal(x.cpu().view(torch.int16), self.x.view(torch.int16))
        return y

    def _fill(self, adapter: int, entry: np.void, memory: torch.Tensor) -> None:
        """Write an adapter's matrices into its slot; the rest of the slot is NaN."""
        end = 0
        own = [self.matrices.get((adapter, part)) for part in range(len(self.shape.outputs))]
        for part, both in enumerate(own):
            entry[f"rank{part}"] = 0 if both is None else padded_rank(len(both[0]))
        for which, name in enumerate("ab"):
            entry[name] = end
            for both in own:
                if both is None:
                    continue
                padding = padded_rank(len(both[0])) - len(both[0])
                widths = (0, 0, 0, padding) if name == "a" else (0, padding)
                numbers = torch.nn.functional.pad(both[which], widths).flatten()
                memory[end : end + len(numbers)] = numbers.to(memory.device)
                end += len(numbers)

    def _tiles(self) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        tiles: list[int] = []
        for adapter in range(self.num_adapters):
            own = [token for token, owner in enumerate(self.owners) if owner == adapter]
            for start in range(0, len(own), TILE):
                tiles += [adapter, len(tokens) + start, min(TILE, len(own) - start)]
            tokens += own
        assert len(tiles) // 3 <= max_tiles(len(self.owners), self.num_adapters)
        return tokens, tiles


QKV = ProductShape(136, (72, 24, 24))
OWNERS = [0, 1, -1, 2, *[1] * 20, -1, 0]


def check(problem: Problem, y: torch.Tensor) -> None:
    wanted, dtype = problem.exact(), problem.x.dtype
    assert relative_error(y, wanted) < ROUNDING[dtype]
    assert share_rounded_otherwise(y, wanted) < 0.01
    without = [token for token, owner in enumerate(problem.owners) if owner < 0]
    assert torch.equal(y.cpu()[without], problem.y[without])


@pytest.mark.parametrize("dtype", ROUNDING)
def test_several_adapters_and_none(loader: KernelLoader, dtype: torch.dtype) -> None:
    problem = Problem.of(QKV, [(8, 16, 3), (0, 40, 17), (5, 0, 0)], OWNERS, dtype)
    check(problem, problem.run(loader, more_tiles=3))


# A block sums over 1024 inputs, in loads of 128 for each of its warps; it has 256 outputs.
@pytest.mark.parametrize("inputs", [8, 120, 1024, 1032, 2056])
def test_inputs(loader: KernelLoader, inputs: int) -> None:
    problem = Problem.of(ProductShape(inputs, (32,)), [(16,), (20,)], [0, 1, 1, -1, 0])
    check(problem, problem.run(loader))


@pytest.mark.parametrize("outputs", [(8,), (64,), (COLUMNS,), (COLUMNS + 8, 72), (264, 520, 8)])
def test_outputs(loader: KernelLoader, outputs: tuple[int, ...]) -> None:
    ranks = [(16,) * len(outputs), (0,) * (len(outputs) - 1) + (9,)]
    problem = Problem.of(ProductShape(64, outputs), ranks, [1, 0, -1, 1, 0])
    check(problem, problem.run(loader))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_each_token_gets_its_own_adapter_s_update(
    loader: KernelLoader, data: st.DataObject
) -> None:
    """And to the last bit what it gets alone."""
    outputs = data.draw(st.lists(st.integers(1, 40).map(lambda n: 8 * n), min_size=1, max_size=3))
    shape = ProductShape(8 * data.draw(st.integers(1, 150)), tuple(outputs))
    rank = st.one_of(st.just(0), st.integers(1, 40), st.just(64))
    ranks = data.draw(st.lists(st.tuples(*[rank] * len(outputs)), min_size=1, max_size=4))
    owner = st.integers(-1, len(ranks) - 1)
    owners = data.draw(
        st.one_of(
            st.lists(owner, min_size=1, max_size=40),
            st.tuples(owner, st.integers(1, 40)).map(lambda drawn: [drawn[0]] * drawn[1]),
        )
    )
    dtype = data.draw(st.sampled_from(sorted(ROUNDING, key=str)))
    problem = Problem.of(shape, ranks, owners, dtype, seed=data.draw(st.integers(0, 1000)))
    y, wanted = problem.run(loader), problem.exact()
    # One rounding of the result; what A gives is kept to 16 bits and more.
    added = (wanted - problem.y.double()).abs().max()
    room = 2 * ROUNDING[dtype] * wanted.abs() + 1e-4 * (1 + added)
    assert ((y.cpu().double() - wanted).abs() <= room).all()
    token = data.draw(st.integers(0, len(owners) - 1))
    if owners[token] >= 0:
        assert torch.equal(problem.alone(token).run(loader)[0], y[token])


def test_the_order_of_threads_and_the_batch_do_not_matter(loaders: list[KernelLoader]) -> None:
    shape = ProductShape(2 * SPLIT + 40, (72, 24))
    problem = Problem.of(shape, [(8, 16), (33, 20)], [0, 1, -1, *[1] * 18])
    results = [problem.run(loader) for loader in loaders]
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)
    for token in (0, 1, 20):
        assert torch.equal(problem.alone(token).run(loaders[0])[0], results[0][token])


def test_a_token_whose_numbers_are_nan_keeps_them_to_itself(loader: KernelLoader) -> None:
    problem = Problem.of(QKV, [(8, 16, 3)], [0, 0, 0])
    problem.x[1] = float("nan")
    y = problem.run(loader)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_no_tokens_with_adapters(loader: KernelLoader) -> None:
    problem = Problem.of(QKV, [(8, 16, 3)], [-1, -1])
    assert torch.equal(problem.run(loader, more_tiles=2).cpu(), problem.y)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        (ProductShape(12, (8,)), torch.bfloat16, "from 12 to"),
        (ProductShape(8, (8, 20)), torch.bfloat16, r"to \[8, 20\] numbers"),
        (ProductShape(8, (8, 8, 8, 8)), torch.bfloat16, "from 8"),
        (ProductShape(8, (8,)), torch.float32, "no adapter kernels for torch.float32"),
    ],
)
def test_what_the_kernels_are_not_made_for(
    loader: KernelLoader, shape: ProductShape, dtype: torch.dtype, words: str
) -> None:
    numbers = torch.zeros(1, 64, dtype=dtype, device=loader.device)
    words32 = torch.zeros(3, dtype=torch.int32, device=loader.device)
    entries = torch.zeros(1, 1, 4, dtype=torch.int64, device=loader.device)
    with pytest.raises(ValueError, match=words):
        LoraUpdate(
            loader,
            shapes=[shape],
            places=numbers,
            entries=entries,
            tiles=words32,
            tokens=words32,
            max_rank=16,
        )


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(1, 50), max_size=6), more=st.integers(0, 3))
def test_there_is_room_for_every_tile(counts: list[int], more: int) -> None:
    tiles = sum(-(-count // TILE) for count in counts)
    assert tiles <= max_tiles(sum(counts), len(counts) + more)
