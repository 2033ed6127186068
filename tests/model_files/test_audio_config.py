"""config.json of models that read audio, with the fields that their published files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from trioserve.model_files.media_config import read_media_config, text_tensor, text_values
from trioserve.protocol.errors import ModelLoadError

PATH = Path("config.json")
FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "vocab_size"),
)
QWEN2_AUDIO: dict[str, Any] = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "audio_config": {"model_type": "qwen2_audio_encoder", "num_mel_bins": 128},
    "audio_token_index": 151646,
    "model_type": "qwen2_audio",
    "text_config": {
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
}


def test_fields_that_are_left_out_are_those_of_transformers() -> None:
    bare = {**QWEN2_AUDIO, "text_config": {"model_type": "qwen2"}}
    for given in (QWEN2_AUDIO, bare):
        values = text_values(PATH, given)
        assert values["torch_dtype"] == "bfloat16"
        expected: Any = transformers.Qwen2AudioConfig(**given).text_config
        for name in FIELDS:
            assert values[name] == getattr(expected, name)


def test_the_token_of_audio_has_two_names() -> None:
    config = read_media_config(PATH, QWEN2_AUDIO, 4096)
    assert config is not None
    assert (config.token_ids, config.width) == ({"audio": 151646}, 4096)
    newer = {"architectures": ["AudioFlamingo3ForConditionalGeneration"], "audio_token_id": 9}
    config = read_media_config(PATH, newer, 8)
    assert config is not None
    assert config.token_ids == {"audio": 9}
    with pytest.raises(ModelLoadError, match="audio_token_index"):
        read_media_config(PATH, {"architectures": newer["architectures"]}, 8)


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("audio_tower.layers.0.fc1.weight", None),
        ("model.multi_modal_projector.linear.weight", None),
    ],
)
def test_tensors_of_the_decoder(stored: str, own: str | None) -> None:
    assert text_tensor(stored) == own
