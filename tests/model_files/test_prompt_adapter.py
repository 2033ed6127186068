"""The contents that a prompt adapter's files may have, and the refusal of anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.lora_adapters import write_adapter
from tests.support.prompt_adapters import write_prefix_adapter, write_prompt_adapter
from trioserve.model_files import prompt_adapter
from trioserve.model_files.prompt_adapter import (
    TENSOR,
    is_prefix,
    is_prompt_adapter,
    read_prompt_adapter,
)
from trioserve.protocol.errors import ModelLoadError

WIDTH, COUNT = 8, 5
FIELDS: dict[str, Any] = {"peft_type": "P_TUNING", "num_virtual_tokens": COUNT}
ROWS = np.ones((COUNT, WIDTH), np.float32)


def refusal(folder: Path, *, width: int = WIDTH, max_model_len: int = 100) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_prompt_adapter(folder, width, max_model_len)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_embeddings_are_read_as_they_are(tmp_path: Path, kind: str, dtype: Any) -> None:
    folder = write_prompt_adapter(
        tmp_path / "it", count=COUNT, width=WIDTH, dtype=dtype, peft_type=kind
    )
    assert is_prompt_adapter(folder)
    expected = np.random.default_rng(0).standard_normal((COUNT, WIDTH)).astype(dtype)
    found = read_prompt_adapter(folder, WIDTH, COUNT + 2)
    assert found.dtype == dtype
    assert np.array_equal(found, expected)


def test_other_folders_are_no_prompt_adapters(tmp_path: Path) -> None:
    assert not is_prompt_adapter(tmp_path / "missing")
    for kind in ("LORA", "CARTRIDGE", None):
        folder = write_adapter(tmp_path / "it", {"peft_type": kind}, {TENSOR: ROWS})
        assert not is_prompt_adapter(folder)
    (tmp_path / "it" / "adapter_config.json").write_text("[")
    assert not is_prompt_adapter(tmp_path / "it")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task_type": "SEQ_CLS"}, ["task_type", "SEQ_CLS", "only CAUSAL_LM"]),
        ({"num_transformer_submodules": 2}, ["num_transformer_submodules = 2", "only 1"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"num_virtual_tokens": None}, ["no num_virtual_tokens"]),
        ({"num_virtual_tokens": 0}, ["num_virtual_tokens = 0"]),
        ({"num_virtual_tokens": 99}, ["num_virtual_tokens = 99", "no room", "100 tokens"]),
        ({"num_virtual_tokens": 4}, ["prompt_embeddings is [5, 8]", "ask for [4, 8]"]),
    ],
)
def test_configurations_that_aren_t_served(
    tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    folder = write_adapter(tmp_path / "it", {**FIELDS, **fields}, {TENSOR: ROWS})
    message = refusal(folder)
    assert all(word in message for word in words), message
    assert message.startswith(str(folder))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({TENSOR: np.ones((COUNT, 9), np.float32)}, ["is [5, 9]", "ask for [5, 8]"]),
        ({TENSOR: np.ones((COUNT, WIDTH), np.int8)}, ["type I8", "F32, F16, BF16 are"]),
        ({TENSOR: ROWS * np.nan}, ["infinities or NaN"]),
        ({TENSOR: (ROWS * np.inf).astype(ml_dtypes.bfloat16)}, ["infinities or NaN"]),
        ({"other": ROWS}, ["no tensor prompt_embeddings"]),
        ({TENSOR: ROWS, "other": ROWS}, ["holds other"]),
    ],
)
def test_tensors_that_aren_t_served(
    tmp_path: Path, tensors: dict[str, Any], words: list[str]
) -> None:
    message = refusal(write_adapter(tmp_path / "it", FIELDS, tensors))
    assert all(word in message for word in words), message


def test_keys_and_values_are_those_of_the_model_s_shape(tmp_path: Path) -> None:
    shape = 3, 2, 4
    folder = write_prefix_adapter(tmp_path / "it", count=COUNT, kv_shape=shape)
    assert is_prompt_adapter(folder)
    assert is_prefix(folder)
    # The worker may take no embeddings.
    assert read_prompt_adapter(folder, 0, 100, shape).shape == (COUNT, 48)
    assert "prefix adapters aren't served with this model" in refusal(folder)
    for other, word in (
        ((4, 2, 4), "num_layers = 3: this model has 4"),
        ((3, 4, 2), "num_attention_heads = 2: this model has 4"),
        ((3, 2, 8), "token_dim = 8: this model has 16"),
    ):
        with pytest.raises(ModelLoadError, match=word):
            read_prompt_adapter(folder, WIDTH, 100, other)


def test_adapters_that_no_message_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path / "it", FIELDS, {TENSOR: ROWS})
    monkeypatch.setattr(prompt_adapter, "MOST_BYTES", ROWS.nbytes - 1)
    assert "has more than 0 MiB of virtual tokens" in refusal(folder)


def test_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "it", FIELDS, {TENSOR: ROWS})
    assert "aren't served with this model" in refusal(folder, width=0)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "is truncated" in refusal(folder)
    weights.unlink()
    assert "no adapter_model.safetensors" in refusal(folder)
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    assert "convert it to safetensors" in refusal(folder)
    config.write_text(json.dumps([FIELDS]))
    assert "not a JSON object" in refusal(folder)
