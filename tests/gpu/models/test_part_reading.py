"""Parts of models whose files are damaged aren't loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from gpu.models.media.tower import MediaTower
from tests.support.tiny_media import make_media_model
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError


def test_a_tower_without_a_tensor(tmp_path: Path) -> None:
    folder = make_media_model("llava", tmp_path)
    files, path = open_model(folder), folder / "model.safetensors"
    whole = load_file(path)
    name = next(name for name in whole if "vision" in name)
    save_file({each: whole[each] for each in whole if each != name}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"has no tensor .*: fetch the model again") as caught:
        MediaTower.load(files, torch.float32, torch.device("cpu"))
    assert name.rpartition(".")[0].rpartition(".")[2] in str(caught.value)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelLoadError, match=r"LlavaForConditionalGeneration in .* can't be"):
        MediaTower.load(files, torch.float32, torch.device("cpu"))
