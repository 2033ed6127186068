"""The compiled kernels turn keys and queries by an image's rows and columns, as torch does."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.gpu.cpu.test_native_model import compiled, distance, logits_of, prompt_of, with_torch
from tests.support.tiny_media import make_media_model
from trioserve.protocol.embeddings import ImageGrid

GRIDS = [ImageGrid(start=1, rows=3, columns=5), ImageGrid(start=24, rows=6, columns=5)]


def test_logits_are_as_near_to_the_exact_ones_as_torch_s(tmp_path: Path) -> None:
    """They are far from those of the same tokens as text."""
    folder, prompt = make_media_model("qwen2_vl", tmp_path), prompt_of(60)
    exact = logits_of(with_torch(folder, torch.float32), prompt, GRIDS)
    rounded = distance(logits_of(with_torch(folder, torch.bfloat16), prompt, GRIDS), exact)
    assert distance(logits_of(compiled(folder), prompt, GRIDS), exact) < 1.3 * rounded + 0.002
    assert distance(logits_of(with_torch(folder, torch.float32), prompt), exact) > 5 * rounded
