"""Matrices of Phi 3 that are several of other families'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from gpu.weights.expected import expected_tensors
from gpu.weights.fused import in_rotated_order, split_fused
from gpu.weights.tensors import load_weights
from tests.support.tiny_models import make_tiny
from trioserve.model_files import ModelConfig, open_model
from trioserve.protocol.errors import ModelLoadError

SIZES = {"q": 64, "k": 32, "v": 32}
QKV = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("phi3", tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return open_model(folder).native


def test_rows_are_split_where_they_are_those_of_the_model(config: ModelConfig) -> None:
    expected = expected_tensors(config)
    stem = "model.layers.1.self_attn."
    parts = {f"{stem}{name}_proj.weight": (rows, 64) for name, rows in SIZES.items()}
    assert split_fused(QKV, (128, 64), expected) == parts
    gates = {f"model.layers.0.mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")}
    assert split_fused("model.layers.0.mlp.gate_up_proj.weight", (192, 64), expected) == gates
    for name, shape in ((QKV, ()), ("lm_head.weight", (1,))):
        assert split_fused(name, shape, expected) == {name: shape}
    for shape in ((127, 64), (128, 63)):
        with pytest.raises(ModelLoadError, match=r"says \[128, 64\]: they don't belong together"):
            split_fused(QKV, shape, expected)


def test_files_with_other_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors[QKV] = tensors[QKV][:-1]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"qkv_proj.weight has the shape \[127, 64\]"):
        list(load_weights(open_model(tmp_path), torch.float32, lambda *_: None))


def test_each_row_is_read_once(folder: Path, config: ModelConfig) -> None:
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    found = dict(load_weights(open_model(folder), torch.float32, lambda *_: None))
    queries = stored[QKV][:64]
    ours = found["model.layers.1.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(in_rotated_order("x.self_attn.q_proj.weight", queries, config), ours)
    for head in range(4):
        theirs = queries[16 * head : 16 * head + 16]
        own = ours[16 * head : 16 * head + 16]
        assert {row.tobytes() for row in own} == {row.tobytes() for row in theirs}
        for pair in range(6):  # of transformers, and the same of ours
            assert np.array_equal(own[[pair, pair + 8]], theirs[[pair, pair + 6]])
    values = found["model.layers.1.self_attn.v_proj.weight"].numpy()
    assert np.array_equal(values, stored[QKV][96:])
