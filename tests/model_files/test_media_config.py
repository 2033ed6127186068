"""The configuration of models with a tower, in the forms in which files have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_media import make_media_model
from trioserve.model_files import ModelConfig, TransformersConfig, open_model
from trioserve.model_files.media_config import text_tensor
from trioserve.protocol.errors import ModelLoadError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_media_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture
def values(folder: Path) -> Any:
    """Fields of config.json; what a test has written there is undone."""
    path = folder / "config.json"
    written = path.read_text()
    yield json.loads(written)
    path.write_text(written)


def write(folder: Path, values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def test_fields_of_the_decoder_may_stand_where_a_decoder_has_them(
    folder: Path, values: dict[str, Any]
) -> None:
    nested = open_model(folder)
    assert nested.native.mrope_section == (8, 12, 12)
    assert nested.media is not None
    assert nested.media.merge_size == 2
    assert nested.media.tokens_per_second == 4
    assert nested.media.token_ids["video"] == values["video_token_id"]
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("spatial_merge_size", "tokens_per_second"):
        del values["vision_config"][name]
    rope["type"] = "mrope"
    del rope["rope_type"]
    write(folder, {**text, **values, "rope_scaling": rope})
    flat = open_model(folder)
    assert flat.config == nested.config
    assert flat.media == nested.media


def test_sections_are_transformers_own_if_the_file_has_none(
    folder: Path, values: dict[str, Any]
) -> None:
    text = values["text_config"]
    text["head_dim"] = 128
    del text["rope_parameters"]
    write(folder, values)
    assert open_model(folder).native.mrope_section == (16, 24, 24)
    assert open_model(folder).native.rope_theta == 1e6


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ([8, 12, 13], "isn't three parts of 32 frequencies"),
        ([16, 16], "isn't three parts of 32 frequencies"),
        ([33, 0, -1], "has mrope_section = "),
        ("8", "has mrope_section = "),
    ],
)
def test_sections_that_cannot_be_are_refused(
    folder: Path, values: dict[str, Any], section: Any, told: str
) -> None:
    values["text_config"]["rope_parameters"]["mrope_section"] = section
    write(folder, values)
    with pytest.raises(ModelLoadError, match=told):
        open_model(folder)


def test_fields_of_gemma_3_may_be_missing(tmp_path: Path) -> None:
    make_media_model("gemma3", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = values["text_config"]
    for name in ("vocab_size", "max_position_embeddings", "eos_token_id", "architectures"):
        text.pop(name, None)
    del values["mm_tokens_per_image"]
    write(tmp_path, {**values, "eos_token_id": [1, 106]})
    files = open_model(tmp_path)
    assert isinstance(files.config, TransformersConfig)
    assert files.config.architecture == "Gemma3ForCausalLM"
    assert (files.config.vocab_size, files.config.max_position_embeddings) == (262208, 131072)
    assert {1, 106} <= set(files.config.eos_token_ids)
    media = files.media
    assert media is not None
    assert (media.tokens_together, media.width) == (256, 256)
    assert (media.token_ids, media.texts) == ({"image": 258}, {"image": "<start_of_image>"})
    with pytest.raises(ModelLoadError, match="Gemma3ForCausalLM isn't served"):
        open_model(tmp_path, "native")


def test_fields_of_phi_4_may_be_missing(tmp_path: Path) -> None:
    make_media_model("phi4", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    media = open_model(tmp_path).media
    assert media is not None
    assert media.token_ids == {"image": 257, "audio": 258}
    names = ("vocab_size", "max_position_embeddings", "original_max_position_embeddings")
    for name in (*names, "bos_token_id", "eos_token_id", "vision_config"):
        values.pop(name, None)
    del values["audio_config"]["audio_token_id"]
    values["rope_parameters"].pop("original_max_position_embeddings", None)
    write(tmp_path, {**values, "sliding_window": 262144})
    files = open_model(tmp_path)
    config = files.config
    assert isinstance(config, ModelConfig)
    assert (config.windows, config.takes_keys) == ((None, None), False)
    # Beyond its training length, LongRoPE would turn cached keys by other angles.
    assert (config.vocab_size, config.max_position_embeddings) == (200064, 4096)
    assert (config.bos_token_id, {199999, 200020} <= set(config.eos_token_ids)) == (199999, True)
    assert files.media is not None
    assert files.media.token_ids == {"image": 200010, "audio": 200011}
    assert (files.media.width, files.media.audio_depends_on_images) == (256, True)


def test_names_of_the_decoder_s_tensors() -> None:
    for prefix in ("model.", "model.language_model.", "language_model.model.", "model.text_model."):
        assert text_tensor(f"{prefix}layers.3.x") == "model.layers.3.x"
    for name in ("visual.blocks.0.x", "model.visual.blocks.0.x", "model.vision_tower.layers.0.x"):
        assert text_tensor(name) is None
    assert text_tensor("model.embed_tokens_extend.image_embed.x") is None
    assert text_tensor("model.lm_head.weight") == "lm_head.weight"
