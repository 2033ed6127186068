"""Rotary positions of M-RoPE are those of transformers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import transformers

from gpu.models.rotary_positions import rotary_positions
from trioserve.protocol.embeddings import ImageGrid

MERGE = 2


def sequence(seed: int) -> tuple[list[int], list[ImageGrid]]:
    """Return a type for each token of a random sequence, 1 in images, and the images' grids."""
    dice = random.Random(seed)
    types, grids = [0] * dice.randint(0, 3), []
    for _ in range(dice.randint(1, 4)):
        grid = ImageGrid(start=len(types), rows=dice.randint(1, 6), columns=dice.randint(1, 6))
        grids.append(grid)
        types += [1] * (grid.stop - grid.start) + [0] * dice.randint(1, 9)
    return types, grids


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_positions_are_those_of_transformers(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")()
    model_class = getattr(transformers, f"{kind}Model")
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    for seed in range(50):
        types, grids = sequence(seed)
        patches = [[1, MERGE * each.rows, MERGE * each.columns] for each in grids]
        wanted, _ = model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            mm_token_type_ids=torch.tensor([types]),
            image_grid_thw=torch.tensor(patches),
        )
        found = rotary_positions(grids, 0, len(types))
        assert found.tolist() == wanted[:, 0].T.tolist()
        for start in range(len(types)):
            for stop in (start + 1, (start + len(types) + 1) // 2, len(types)):
                part = rotary_positions(grids, start, stop)
                assert np.array_equal(part, found[start:stop])
