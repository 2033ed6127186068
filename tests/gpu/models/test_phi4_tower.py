"""Phi-4's tower for images: an image without padding, of which all patches see each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from gpu.models.media.phi4 import phi4_features
from gpu.models.media.tower import MediaTower
from tests.support.media_files import noise
from tests.support.tiny_media import make_media_model
from trioserve.model_files import open_model
from trioserve.requests.media.processors import MediaProcessor


def test_embeddings_of_an_image_without_padding(tmp_path: Path) -> None:
    """With eager attention, transformers' own tower makes no exception for such images."""
    folder = make_media_model("phi4", tmp_path)
    arrays = MediaProcessor(str(folder), {}).of_image(noise(448, 448)).arrays
    assert arrays["image_attention_mask"].all()
    tower = MediaTower.load(open_model(folder), torch.float32, torch.device("cpu"))
    embeddings = tower.embed(arrays)
    eager: Any = transformers.Phi4MultimodalForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    names = ("image_pixel_values", "image_sizes", "image_attention_mask")
    given = {name: torch.from_numpy(np.asarray(arrays[name])) for name in names}
    with torch.inference_mode():
        wanted = phi4_features(eager.eval().model, **given)[0]
    bound = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(embeddings, wanted, rtol=0, atol=bound)
