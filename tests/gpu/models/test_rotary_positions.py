"""Rotary positions of M-RoPE are those of transformers, and behind long videos the models' own."""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import transformers

from gpu.models.rotary_positions import rotary_positions
from tests.support.qwen_inputs import MERGE, qwen_positions
from trioserve.protocol.embeddings import ImageGrid


def sequence(seed: int, tokens_per_second: int) -> tuple[dict[str, Any], list[ImageGrid]]:
    """Return the inputs of a model for a random prompt, and the grids of its images and videos.

    A token is 1 in images, 2 in videos, and 0 in text. Without ``tokens_per_second``, a frame
    takes a position.
    """
    dice = random.Random(seed)
    types, grids = [0] * dice.randint(0, 3), []
    inputs: dict[str, Any] = {}
    for _ in range(dice.randint(1, 4)):
        grid = ImageGrid(start=len(types), rows=dice.randint(1, 6), columns=dice.randint(1, 6))
        is_video = dice.random() < 0.5
        if is_video:
            seconds = dice.choice([0.08, 0.48, 0.5, 1.0, 37.5])
            grid = attrs.evolve(
                grid,
                frames=dice.randint(1, 6),
                interval=float(np.float32(seconds)) * tokens_per_second or 1.0,
            )
            inputs.setdefault("second_per_grid_ts", []).append(seconds)
        patches = [grid.frames, MERGE * grid.rows, MERGE * grid.columns]
        inputs.setdefault(f"{('image', 'video')[is_video]}_grid_thw", []).append(patches)
        grids.append(grid)
        types += [1 + is_video] * (grid.stop - grid.start) + [0] * dice.randint(1, 9)
    tensors = {name: torch.tensor(values) for name, values in inputs.items()}
    return {"input_ids": torch.tensor([types]), **tensors}, grids


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_positions_are_those_of_transformers(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(image_token_id=1, video_token_id=2)
    model_class = getattr(transformers, f"{kind}Model")
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = config
    num_compared = 0
    for seed in range(80):
        inputs, grids = sequence(seed, getattr(config.vision_config, "tokens_per_second", 0))
        wanted = qwen_positions(model, inputs)
        if all(grid.num_positions == max(grid.rows, grid.columns) for grid in grids):
            num_compared += 1
            told, _ = model.get_rope_index(mm_token_type_ids=inputs["input_ids"], **inputs)
            assert torch.equal(told, wanted)
        found = rotary_positions(grids, 0, inputs["input_ids"].shape[1])
        assert found.tolist() == wanted[:, 0].T.tolist()
        for start in range(len(found)):
            for stop in (start + 1, (start + len(found) + 1) // 2, len(found)):
                part = rotary_positions(grids, start, stop)
                assert np.array_equal(part, found[start:stop])
    assert num_compared > 20
