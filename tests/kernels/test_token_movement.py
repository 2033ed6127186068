"""Tokens gathered from the device's history, and updates scattered into it."""

from __future__ import annotations

import pytest
import torch

from gpu.kernels import KernelLoader
from gpu.kernels.gather_tokens import GatherTokens
from gpu.kernels.scatter_updates import ScatterUpdates
from tests.kernels.memory import place, poisoned


def ints(values: torch.Tensor, loader: KernelLoader) -> torch.Tensor:
    return place(values.to(torch.int32), loader)


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 300])
def test_gather(loader: KernelLoader, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    history = torch.randint(1, 1 << 17, (5, 40), generator=generator)
    slots = torch.randint(0, 5, (num_tokens,), generator=generator)
    positions = torch.randint(0, 40, (num_tokens,), generator=generator)
    tokens = poisoned((num_tokens,), torch.int64, loader)
    gather = GatherTokens(loader, history=ints(history, loader))
    gather.launch(ints(slots, loader), ints(positions, loader), tokens)
    assert torch.equal(tokens.cpu(), history[slots, positions])


def test_padding_and_failed_draws_become_token_0(loader: KernelLoader) -> None:
    history = ints(torch.tensor([[7, 8, -1], [9, 10, 11]]), loader)
    slots = ints(torch.tensor([0, 0, -1, 1, -1]), loader)
    positions = ints(torch.tensor([1, 2, 0, 2, 1 << 30]), loader)
    tokens = poisoned((5,), torch.int64, loader)
    GatherTokens(loader, history=history).launch(slots, positions, tokens)
    assert tokens.tolist() == [8, 0, 0, 11, 0]


def test_history_may_be_part_of_wider_rows(loader: KernelLoader) -> None:
    arena = ints(torch.arange(20).view(2, 10), loader)
    tokens = poisoned((2,), torch.int64, loader)
    gather = GatherTokens(loader, history=arena[:, 4:])
    gather.launch(ints(torch.tensor([0, 1]), loader), ints(torch.tensor([0, 5]), loader), tokens)
    assert tokens.tolist() == [4, 19]


# More pairs than the emulation's threads, fewer than one block has, and none.
@pytest.mark.parametrize("num_updates", [0, 1, 255, 256, 4000])
def test_scatter(loader: KernelLoader, num_updates: int) -> None:
    generator = torch.Generator().manual_seed(num_updates)
    before = torch.randint(0, 1 << 30, (5000,), generator=generator).to(torch.int32)
    index = torch.randperm(5000, generator=generator)[:num_updates]
    values = torch.randint(-5, 1 << 30, (num_updates,), generator=generator)
    updates = torch.stack([index, values], dim=1).view(-1)
    beyond = torch.tensor([1, -9] * 10)  # pairs past the end must not be applied
    arena = ints(before, loader)
    scatter = ScatterUpdates(
        loader,
        arena=arena,
        updates=ints(torch.cat([updates, beyond]), loader),
        num_updates=ints(torch.tensor([num_updates]), loader),
    )
    scatter.launch()
    before[index] = values.to(torch.int32)
    assert torch.equal(arena.cpu(), before)


def test_scatter_again_with_other_updates(loader: KernelLoader) -> None:
    arena, updates = ints(torch.zeros(8), loader), ints(torch.tensor([2, 5, 3, 6]), loader)
    count = ints(torch.tensor([1]), loader)
    scatter = ScatterUpdates(loader, arena=arena, updates=updates, num_updates=count)
    scatter.launch()
    assert arena.tolist() == [0, 0, 5, 0, 0, 0, 0, 0]
    updates[:] = torch.tensor([7, 1, 0, 2])
    count[:] = 2
    scatter.launch()
    assert arena.tolist() == [2, 0, 5, 0, 0, 0, 0, 1]


def test_refusals(loader: KernelLoader) -> None:
    good = ints(torch.zeros(4), loader)
    with pytest.raises(ValueError, match="history"):
        GatherTokens(loader, history=good)
    with pytest.raises(ValueError, match="arena"):
        ScatterUpdates(loader, arena=good.long(), updates=good, num_updates=good)
    with pytest.raises(ValueError, match="pairs"):
        ScatterUpdates(loader, arena=good, updates=good[1:3], num_updates=good)
