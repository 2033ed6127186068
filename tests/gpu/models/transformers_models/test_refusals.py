"""Models that aren't served through transformers: each is refused in one line that names why."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import safetensors.torch
import torch

from gpu.loading.loaded_model import unseen
from gpu.loading.loading import load
from gpu.models.transformers_models import check
from gpu.models.transformers_models.attention import PagedLayers
from gpu.models.transformers_models.loading import load_through_transformers, refuse_small_steps
from gpu.sampling.adjustments import NoAdjuster
from gpu.weights.replacement import weights_for
from tests.gpu.models.transformers_models.models import FAMILIES, UNSERVED, make_other
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny
from trioserve import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.model_files import TransformersConfig, open_model
from trioserve.model_files.media_config import MediaConfig
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import extra_advice


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other(*FAMILIES["gpt_neox"], tmp_path_factory.mktemp("neox"))


@pytest.fixture
def changed(neox: Path, tmp_path: Path) -> Callable[..., Path]:
    """``changed(**fields)`` is that model with other fields in config.json."""

    def change(**fields: Any) -> Path:
        folder = shutil.copytree(neox, tmp_path / "changed")
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **fields}))
        return folder

    return change


def refusal(folder: Path, **options: Any) -> str:
    defaults = {"device": "cpu", "dtype": "float32", "num_threads": 1}
    config = EngineConfig(str(folder), **{**defaults, **options})
    with pytest.raises(ModelLoadError) as caught:
        load(start_message(config, folder), unseen)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", sorted(UNSERVED))
def test_families(family: str, tmp_path: Path) -> None:
    prefix, fields, said = UNSERVED[family]
    with pytest.raises(ModelLoadError, match=said):
        raise ModelLoadError(refusal(make_other(prefix, fields, tmp_path)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_lora": True}, "with no adapters: leave out --enable-lora"),
        ({"quantization": "int8"}, "with no rounded weights: leave out --quantization int8"),
        ({"deterministic": True}, "leave out --deterministic"),
        ({"kv_cache_dtype": "fp8"}, "leave --kv-cache-dtype at auto"),
        ({"max_model_len": 513}, "--max-model-len 513 is more than this model's 512 positions"),
    ],
)
def test_options(neox: Path, options: dict[str, Any], said: str) -> None:
    assert said in refusal(neox, **options)


def test_steps_without_room_for_an_image(neox: Path) -> None:
    media = MediaConfig(architecture="A", width=8, token_ids={"image": 1}, tokens_together=16)
    config = EngineConfig(str(neox), max_num_seqs=2, max_num_batched_tokens=16)
    start = start_message(config, neox)
    with pytest.raises(ModelLoadError, match="--max-num-batched-tokens 16 must be at least 17"):
        refuse_small_steps(start, media)
    refuse_small_steps(attrs.evolve(start, max_num_batched_tokens=17), media)
    refuse_small_steps(start, attrs.evolve(media, tokens_together=0))


def test_a_gpu(neox: Path) -> None:
    start = start_message(EngineConfig(str(neox), device="cuda"), neox)
    files = open_model(neox)
    with pytest.raises(ModelLoadError, match=r"GPTNeoXForCausalLM .* no GPU: use --device cpu"):
        load_through_transformers(start, files, "bfloat16", "cuda:0", unseen, NoAdjuster())


def test_without_transformers(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    assert refusal(neox).endswith("isn't installed: " + extra_advice("transformers"))


def test_a_class_that_transformers_does_not_have(changed: Callable[..., Path]) -> None:
    folder = changed(architectures=["TomorrowForCausalLM"], auto_map={"AutoConfig": "x.Config"})
    said = refusal(folder)
    assert "has no TomorrowForCausalLM: a newer one may, and code that comes with" in said


def test_a_configuration_of_another_class(changed: Callable[..., Path]) -> None:
    said = refusal(changed(architectures=["GPT2LMHeadModel"]))
    assert "it comes with a configuration of gpt_neox" in said


def test_a_class_that_chooses_others(changed: Callable[..., Path]) -> None:
    said = refusal(changed(architectures=["AutoModelForCausalLM"]))
    assert said.startswith("AutoModelForCausalLM can't be served through transformers")


def test_an_adapter_beside_the_model(changed: Callable[..., Path]) -> None:
    """Refuse it: transformers would load the adapter's base model instead, wherever that is."""
    folder = changed()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert f"it comes with an adapter in {folder}: merge the two" in refusal(folder)


def test_a_configuration_that_contradicts_itself(changed: Callable[..., Path]) -> None:
    said = refusal(changed(num_attention_heads="many"))
    assert said.startswith("GPTNeoXForCausalLM can't be served through transformers: it can't be")


def test_tensors_that_are_missing(neox: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(neox, tmp_path / "less")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["gpt_neox.layers.1.mlp.dense_h_to_4h.bias"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "1 missing tensors, such as gpt_neox.layers.1.mlp.dense_h_to_4h.bias" in refusal(folder)


def test_tensors_without_a_place(neox: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(neox, tmp_path / "more")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.1.gate.weight"] = torch.ones(3)
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "1 unexpected tensors, such as gpt_neox.layers.1.gate.weight" in refusal(folder)


def test_other_logits_than_with_plain_attention(
    neox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a family may do that a probe doesn't see: here, keys that were another's."""
    attend = PagedLayers.attend
    monkeypatch.setattr(
        PagedLayers,
        "attend",
        lambda self, call: attend(self, attrs.evolve(call, key=call.key.roll(1, 2))),
    )
    for dtype in ("float32", "bfloat16"):
        said = refusal(neox, dtype=dtype)
        assert "it gives other logits over a paged cache than with plain attention" in said


def test_rounding_is_no_other_logits(neox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure rounding that isn't small by the difference between transformers' own attentions."""
    monkeypatch.setattr(check, "TOLERANCES", {torch.bfloat16: 0.0})
    start = start_message(EngineConfig(str(neox), dtype="bfloat16", device="cpu"), neox)
    assert load(start, unseen).ready.dtype == "bfloat16"
    monkeypatch.setattr(check, "MOST_ROUNDING", 0.0)
    assert "other logits" in refusal(neox, dtype="bfloat16")


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = make_tiny("smollm2", tmp_path)
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    assert "GGUF file, which isn't served through" in refusal(path, model_impl="transformers")


def test_a_family_without_a_file_where_native_is_asked_for(neox: Path) -> None:
    assert "architecture GPTNeoXForCausalLM isn't served" in refusal(neox, model_impl="native")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"is_encoder_decoder": True}, "GPTNeoXForCausalLM isn't served"),
        ({"architectures": ["ViTForImageClassification"]}, "ViTForImageClassification isn't"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with gptq aren't served"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers = 1000000000, which can't be"),
        ({"max_position_embeddings": None}, "has no max_position_embeddings"),
    ],
)
@pytest.mark.parametrize("implementation", ["auto", "transformers"])
def test_what_the_engine_sees_itself(
    changed: Callable[..., Path], fields: dict[str, Any], said: str, implementation: str
) -> None:
    with pytest.raises(ModelLoadError, match=said):
        open_model(changed(**fields), implementation)


def test_weights_of_another_shape_or_in_a_single_file(
    neox: Path, changed: Callable[..., Path]
) -> None:
    files = open_model(neox)
    other = changed(rotary_pct=0.5, eos_token_id=7, rope_parameters=None)
    with pytest.raises(ModelLoadError, match=r"rotary_pct is 0\.5 instead of None"):
        weights_for(files, other)
    with pytest.raises(ModelLoadError, match="transformers reads whole folders"):
        weights_for(files, neox / "model.safetensors")


@pytest.mark.parametrize("inside", [True, False])
def test_longrope_ends_where_the_rotation_of_everything_changes(
    changed: Callable[..., Path], inside: bool
) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    original = {"original_max_position_embeddings": 64}
    fields = (
        {"rope_scaling": {**rope, **original}} if inside else {"rope_scaling": rope, **original}
    )
    config = open_model(changed(rope_parameters=None, **fields)).config
    assert isinstance(config, TransformersConfig)
    assert config.max_position_embeddings == 64
