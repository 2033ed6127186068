"""Cases of the adapters' kernels: a product of Llama-3.1-8B, its tokens with adapters in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from bench.kernels.case import Case, Contestant, Contestants, Setting
from bench.kernels.roofline import lora_update
from bench.kernels.targets import OURS, Target
from gpu.kernels.lora import ENTRY, TILE, LoraUpdate, ProductShape, padded_rank

Update = Callable[[torch.Tensor, torch.Tensor], object]


# Tokens, adapters, their rank, and what a product has of inputs and outputs.
_SHAPES: Mapping[tuple[int, ...], Sequence[Target]] = {
    (1, 1, 16, 4096, 4096): [Target("microseconds", 8.0)],
    (32, 8, 16, 4096, 4096): [Target("microseconds", 10.0)],
    (256, 8, 16, 4096, 4096): [],
    (256, 8, 64, 14336, 4096): [],
    (8192, 4, 16, 4096, 4096): [Target("floor", 0.5)],
}
_TINY: Mapping[tuple[int, ...], Sequence[Target]] = {(5, 2, 16, 1096, 88): []}


def cases(*, tiny: bool) -> list[Case]:
    """Return every case of these kernels."""
    return [
        Case(
            kernel="lora",
            shape=f"{num_tokens}x{inputs} to {outputs}, {adapters} of rank {rank}",
            work=lora_update(num_tokens, adapters, inputs, outputs, rank),
            make=partial(_contestants, num_tokens, adapters, rank, inputs, outputs),
            targets=targets,
            first=rank == 16,
        )
        for (num_tokens, adapters, rank, inputs, outputs), targets in (
            _TINY if tiny else _SHAPES
        ).items()
    ]


def _contestants(
    num_tokens: int, adapters: int, rank: int, inputs: int, outputs: int, setting: Setting
) -> Contestants:
    a = setting.random(adapters, rank, inputs, scale=inputs**-0.5)
    b = setting.random(adapters, outputs, rank, scale=rank**-0.5)
    work = lora_update(num_tokens, adapters, inputs, outputs, rank)
    sets = [
        (setting.random(num_tokens, inputs), setting.random(num_tokens, outputs))
        for _ in range(setting.sets(work.bytes))
    ]
    (x, y), *_ = sets
    # Each adapter has one token, in turn.
    every = torch.arange(num_tokens, device=setting.device)
    before, tokens = y.clone(), [every[first::adapters] for first in range(adapters)]

    def expected() -> torch.Tensor:
        wanted = before.double()
        by_group(x.double(), wanted, a.double(), b.double())
        return wanted

    def by_group(
        x: torch.Tensor, y: torch.Tensor, a: torch.Tensor = a, b: torch.Tensor = b
    ) -> None:
        for adapter, own in enumerate(tokens):
            y.index_add_(0, own, x.index_select(0, own) @ a[adapter].t() @ b[adapter].t())

    def contestant(run: Update) -> Contestant:
        # Launches add up.
        return Contestant.over(sets, run, expected, prepare=lambda: y.copy_(before))

    return {
        OURS: lambda: contestant(_kernels(a, b, tokens, setting)),
        "torch eager": lambda: contestant(by_group),
    }


def _kernels(
    a: torch.Tensor, b: torch.Tensor, tokens: list[torch.Tensor], setting: Setting
) -> Update:
    adapters, rank, inputs = a.shape
    assert padded_rank(rank) == rank
    shape = ProductShape(inputs, (b.shape[1],))
    entries = np.zeros((adapters, 1), ENTRY)
    entries["b"], entries["rank0"] = a[0].numel(), rank
    tiles: list[tuple[int, int, int]] = []
    first = 0
    for adapter, own in enumerate(tokens):
        starts = range(0, len(own), TILE)
        tiles += [(adapter, first + start, min(TILE, len(own) - start)) for start in starts]
        first += len(own)
    update = LoraUpdate(
        setting.loader,
        shapes=[shape],
        places=torch.cat([a.flatten(1), b.flatten(1)], dim=1),
        entries=torch.from_numpy(entries.view(np.int64).reshape(-1, 1, 4)).to(setting.device),
        tiles=torch.tensor(tiles, dtype=torch.int32, device=setting.device),
        tokens=torch.cat(tokens).to(torch.int32),
        max_rank=rank,
    )
    return partial(update.launch, 0, shape, len(tiles))
