"""The contents that an adapter's files may have, and the one-line refusal of anything else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu.lora.reading import read_adapter
from gpu.weights.reading import check_finite
from tests.support.lora_adapters import ALL_PARTS, make_adapter
from tests.support.tiny_models import make_tiny
from trioserve.model_files import ModelConfig, open_model, shards
from trioserve.protocol.errors import ModelLoadError

Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
_FUSED = Q.replace("q_proj", "qkv_proj")
_OF_EXPERT = Q.replace("self_attn.q_proj", "mlp.experts.3.up_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"))


@pytest.fixture(scope="module")
def config(model: Path) -> ModelConfig:
    return open_model(model).config


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    return make_adapter(model, tmp_path / "adapter")


def refusal(folder: Path, config: ModelConfig, max_rank: int = 16) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_adapter(folder, config, max_rank)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = str(folder / "adapter_model.safetensors")
    tensors = dict(safetensors.numpy.load_file(path))
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


def test_what_is_read(adapter: Path, config: ModelConfig) -> None:
    found = read_adapter(adapter, config, 4)
    assert found.rank == 4
    assert set(found.updates) == {(layer, part) for layer in (0, 1) for part in ALL_PARTS}
    down = found.updates[1, "mlp.down_proj"]
    assert (down.a.shape, down.b.shape, down.scale) == ((4, 96), (64, 4), 2.0)
    assert read_adapter(adapter, config, 4).checksum == found.checksum
    change_config(adapter, lora_alpha=16)
    again = read_adapter(adapter, config, 4)
    assert again.updates[1, "mlp.down_proj"].scale == 4.0
    assert again.checksum != found.checksum


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, ["use_dora", "DoRA"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"bias": "all"}, ["bias", "'all'"]),
        ({"lora_bias": True}, ["lora_bias"]),
        ({"peft_type": "IA3"}, ["peft_type", "IA3"]),
        ({"peft_type": None}, ["peft_type"]),
        ({"task_type": "SEQ_CLS"}, ["task_type", "SEQ_CLS"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
        ({"trainable_token_indices": [1]}, ["trainable_token_indices"]),
        ({"layer_replication": [[0, 1]]}, ["layer_replication"]),
        ({"r": 17}, ["rank of 17", "--max-lora-rank"]),
        ({"r": 0}, ["r = 0"]),
        ({"r": 4.5}, ["r = 4.5"]),
        ({"r": None}, ["no r"]),
        ({"lora_alpha": float("nan")}, ["lora_alpha"]),
        ({"lora_alpha": "8"}, ["lora_alpha"]),
        ({"use_rslora": "yes"}, ["use_rslora"]),
        ({"rank_pattern": {"q_proj": 1000}}, ["rank of 1000"]),
        ({"rank_pattern": {"q_proj": 3}}, ["q_proj", "[4, 64]", "[3, 64]"]),
        ({"rank_pattern": {"(a+)+$": 3}}, ["rank_pattern", "(a+)+$"]),
        ({"alpha_pattern": [3]}, ["alpha_pattern"]),
        ({"alpha_pattern": {"q_proj": -1}}, ["q_proj = -1"]),
    ],
)
def test_configurations_that_aren_t_served(
    adapter: Path, config: ModelConfig, fields: dict[str, Any], words: list[str]
) -> None:
    change_config(adapter, **fields)
    message = refusal(adapter, config)
    assert all(word in message for word in words), message
    assert message.startswith(str(adapter))


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("base_model.model.lm_head.lora_A.weight", np.ones((4, 64), np.float32)), ["lm_head"]),
        (
            _set("base_model.model.model.embed_tokens.lora_embedding_A", np.ones((4, 300))),
            ["embed_tokens"],
        ),
        (_set(Q.replace("lora_A.weight", "lora_magnitude_vector"), np.ones(64)), ["magnitude"]),
        (_set(Q.replace("layers.0", "layers.2"), np.ones((4, 64), np.float32)), ["has 2 layers"]),
        (_set(Q.replace("layers.0", "layers.00"), np.ones((4, 64), np.float32)), ["layers.00"]),
        (_set(_OF_EXPERT, np.ones((4, 64), np.float32)), [_OF_EXPERT, "experts", "attention are"]),
        (_set(_FUSED, np.ones((4, 64), np.float32)), [_FUSED, "a llama model has no such matrix"]),
        (_set(Q, np.ones((4, 65), np.float32)), [Q, "[4, 65]", "[4, 64]"]),
        (_set(Q, np.ones((4, 64), np.int8)), [Q, "I8"]),
        (lambda tensors: tensors.pop(Q), ["lora_B.weight without its lora_A"]),
        (lambda tensors: tensors.clear(), ["no tensors"]),
    ],
)
def test_tensors_that_aren_t_served(
    adapter: Path,
    config: ModelConfig,
    change: Callable[[dict[str, Any]], None],
    words: list[str],
) -> None:
    change_tensors(adapter, change)
    message = refusal(adapter, config)
    assert all(word in message for word in words), message


def test_fused_matrices_of_phi_3(tmp_path: Path) -> None:
    """Queries and keys have the first of a head's rotated numbers in its first half."""
    path = make_tiny("phi3", tmp_path / "model")
    config = open_model(path).native
    adapter = make_adapter(path, tmp_path / "adapter")
    found = read_adapter(adapter, config, 4)
    assert set(found.updates) == {(layer, part) for layer in (0, 1) for part in ALL_PARTS}
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    a, b = (
        tensors[f"base_model.model.model.layers.1.self_attn.qkv_proj.lora_{letter}.weight"]
        for letter in "AB"
    )
    parts = [found.updates[1, f"self_attn.{name}_proj"] for name in "qkv"]
    assert all(np.array_equal(part.a, a) for part in parts)
    assert [part.b.shape for part in parts] == [(64, 4), (32, 4), (32, 4)]
    rows = [*range(6), 12, 13, *range(6, 12), 14, 15]  # of 16, of which 12 are rotated
    first, second = parts[0].b[16:32], parts[1].b[:16]
    assert np.array_equal(first, b[[16 + row for row in rows]])
    assert np.array_equal(second, b[[64 + row for row in rows]])
    assert np.array_equal(parts[2].b, b[96:])
    change_tensors(adapter, _set(Q, np.ones((4, 64), np.float32)))
    assert f"{Q}, but a phi3 model has no such matrix" in refusal(adapter, config)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite(
    adapter: Path, config: ModelConfig, dtype: Any, number: float
) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors[Q] = tensors[Q].astype(dtype)
        tensors[Q][-1, -1] = number

    change_tensors(adapter, spoil)
    assert f"tensor {Q} holds infinities or NaN" in refusal(adapter, config)


def test_the_largest_number_of_a_bfloat16_is_finite(tmp_path: Path) -> None:
    tensor = np.full((3, 100_001), ml_dtypes.finfo(ml_dtypes.bfloat16).max, ml_dtypes.bfloat16)
    check_finite(tmp_path, "name", tensor)
    tensor[2, 100_000] = np.nan
    with pytest.raises(ModelLoadError, match="tensor name holds"):
        check_finite(tmp_path, "name", tensor)


def test_a_header_of_very_many_tensors_is_not_parsed(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % i for i in range(400_000)) + "}").encode()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header)
    monkeypatch.setattr(shards, "parse_object", None)
    with pytest.raises(ModelLoadError, match="a header of about 3199999 values; at most 1048576"):
        shards.read_shard(weights)
    weights.write_bytes((33 << 20).to_bytes(8, "little") + header)
    with pytest.raises(ModelLoadError, match="no safetensors header of up to 33554432 bytes"):
        shards.read_shard(weights)


def test_files_that_are_missing_or_damaged(adapter: Path, config: ModelConfig) -> None:
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "is truncated" in refusal(adapter, config)
    weights.write_bytes(b"\xff" * 100)
    assert "no safetensors header" in refusal(adapter, config)
    weights.unlink()
    assert "no adapter_model.safetensors" in refusal(adapter, config)
    (adapter / "adapter_model.bin").write_bytes(b"pickle")
    assert "convert it to safetensors" in refusal(adapter, config)
    path = adapter / "adapter_config.json"
    path.write_text("[]")
    assert "not a JSON object" in refusal(adapter, config)
    path.write_text("{" + " " * (1 << 20) + "}")
    assert "more than 1048576 bytes" in refusal(adapter, config)
    path.unlink()
    assert "adapter_config.json is missing" in refusal(adapter, config)
    os.mkfifo(path)
    assert "adapter_config.json is missing" in refusal(adapter, config)


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_byte_may_be_wrong(data: st.DataObject, model: Path, config: ModelConfig) -> None:
    """Read a damaged file: the result is an adapter, if only numbers are wrong, or a refusal."""
    folder = model.parent / "damaged"
    if not folder.exists():
        make_adapter(model, folder)
        for path in folder.iterdir():
            path.rename(path.with_suffix(path.suffix + ".whole"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        raw = bytearray((folder / f"{name}.whole").read_bytes())
        header = min(len(raw), 3000)
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))
        (folder / name).write_bytes(raw[:cut])
    with contextlib.suppress(ModelLoadError):
        assert read_adapter(folder, config, 16).rank == 4
