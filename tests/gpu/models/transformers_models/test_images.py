"""Attention over images is that of transformers' masks, wherever a chunk begins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

from gpu.attention import CacheShape, StepLayout
from gpu.attention.scores import ScoreRule, attend_by_rule
from gpu.models.transformers_models.images import ImageAttention
from trioserve.protocol.embeddings import ImageGrid

LENGTH, HEADS, KV_HEADS, DIM, PAGE = 24, 4, 2, 8, 4
IMAGES = [ImageGrid(start=3, rows=1, columns=9), ImageGrid(start=14, rows=2, columns=3)]
PAGES = [5, 2, 0, 3, 1, 4]
RULE = ScoreRule(scale=0.3)
SLOT = 7


def visible(window: int | None) -> torch.Tensor:
    """Return transformers' mask [LENGTH, LENGTH], True where a query sees a key."""
    blocks = torch.full((1, LENGTH), -1)
    for number, image in enumerate(IMAGES):
        blocks[0, image.start : image.stop] = number
    function = or_masks(causal_mask_function, blockwise_overlay(blocks))
    if window is not None:
        function = and_masks(sliding_window_overlay(window), function)
    places = torch.arange(LENGTH)
    seen: torch.Tensor = function(0, 0, places[:, None], places)
    return seen


def step(start: int, stop: int) -> StepLayout:
    return StepLayout(
        positions=np.arange(start, stop),
        query_start=np.array([0, stop - start]),
        context_lens=np.array([stop]),
        slots=np.array([SLOT]),
        block_tables=np.array([PAGES]),
        num_decode_rows=int(stop - start == 1),
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_chunks_see_whole_images(window: int | None, softcap: float | None) -> None:
    torch.manual_seed(1)
    shape = CacheShape(
        num_layers=1,
        num_pages=len(PAGES),
        page_size=PAGE,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention = ImageAttention(shape, HEADS, None, [window])
    attention.images = {SLOT: IMAGES}
    q, k, v = (torch.randn(LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rule = ScoreRule(scale=0.3, softcap=softcap)
    keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for each in (k, v))
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~visible(window), -torch.inf)
    wanted = attend_by_rule(q.transpose(0, 1), keys, values, rule, mask, None).transpose(0, 1)
    attention.begin(step(0, LENGTH))
    attention.write(0, torch.cat([k, v], 1))
    num_within = 0
    for stop in range(1, LENGTH + 1):
        if any(image.start < stop < image.stop for image in IMAGES):
            continue
        for start in range(stop):
            attention.begin(step(start, stop))
            found = attention.attend(0, q[start:stop], window, rule)
            assert torch.allclose(found, wanted[start:stop], atol=1e-5), (start, stop)
            num_within += any(image.start < start < image.stop for image in IMAGES)
    assert num_within > 50
    attention.begin(step(0, LENGTH))
    attention.images = {}
    attention.begin(step(0, LENGTH))
    assert not torch.allclose(attention.attend(0, q, window, rule), wanted, atol=0.1)
