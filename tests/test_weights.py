"""Weights from both kinds of files, against the gguf package and the models that were saved."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.weights import BFLOAT16, FLOAT32, expected_tensors
from gpu.weights.dequantize import BLOCK_DECODERS, dequantize
from gpu.weights.gguf import unpermute
from gpu.weights.tensors import as_tensor, load_weights
from tests.tiny_gguf import permute, random_blocks, write_gguf
from tests.tiny_models import FAMILIES, make_tiny
from trioserve.errors import ModelLoadError
from trioserve.model_files import ModelFiles, locate, open_model
from trioserve.model_files.gguf_header import TENSOR_TYPES


def load(files: ModelFiles, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All weights, with a check that progress never falls back and ends at the whole."""
    steps: list[tuple[int, int]] = []
    weights = dict(load_weights(files, dtype, lambda done, total: steps.append((done, total))))
    assert len(steps) == len(weights)
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]
    return weights


def saved(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("name", [type_.name for type_ in TENSOR_TYPES.values()])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_dequantize_equals_the_gguf_package(name: str, dtype: np.dtype[Any]) -> None:
    type_ = next(known for known in TENSOR_TYPES.values() if known.name == name)
    num_blocks = 3 * (1 << 18) // type_.block_numbers // 2  # one and a half chunks
    blocks, kind = random_blocks(name, num_blocks)
    reference = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy()).view(-1)
    assert reference.isfinite().all()
    got = dequantize(blocks.reshape(-1), type_, dtype)
    assert got.dtype == dtype
    tensor = as_tensor(got)
    assert torch.equal(tensor, reference.to(tensor.dtype))


def test_every_tensor_type_has_a_decoder_and_the_size_that_ggml_gives_it() -> None:
    plain = {"F32", "F16", "BF16"}
    assert {type_.name for type_ in TENSOR_TYPES.values()} == plain | BLOCK_DECODERS.keys()
    for number, type_ in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (type_.name, type_.block_numbers, type_.block_bytes) == (
            kind.name,
            *gguf.GGML_QUANT_SIZES[kind],
        )


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_unpermute_is_the_index_formula(shape: tuple[int, ...]) -> None:
    """Of a head's rows, the file has 0, h, 1, h+1, … where Hugging Face has 0, 1, … h, h+1, …"""
    heads, head_dim = 3, 8
    tensor = np.random.default_rng(0).standard_normal(shape)
    order = []
    for head in range(heads):
        rows = range(head * head_dim, (head + 1) * head_dim)
        order += [*rows[0::2], *rows[1::2]]
    assert np.array_equal(unpermute(tensor, heads), tensor[order])
    assert np.array_equal(unpermute(permute(tensor, heads), heads), tensor)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_tensors_that_were_saved(family: str, tmp_path: Path) -> None:
    files = open_model(make_tiny(family, tmp_path))
    weights = load(files)
    assert same(weights, saved(tmp_path))
    assert {name: tuple(t.shape) for name, t in weights.items()} == expected_tensors(files.config)


def test_sharded_folders_are_read_whole(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    half = load(open_model(tmp_path), torch.bfloat16)
    assert same(half, {name: t.bfloat16() for name, t in saved(tmp_path).items()})


def test_old_folders_tensors_that_say_nothing_new_are_left_out(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    tensors = saved(tmp_path)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert same(load(open_model(tmp_path)), tensors)


def test_loaded_tensors_survive_the_end_of_their_file(tmp_path: Path) -> None:
    make_tiny("llama2", tmp_path)
    expected = saved(tmp_path)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    weights = load(open_model(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert same(weights, expected)


@pytest.mark.parametrize("family", ["llama2", "llama3", "smollm2", "smollm3", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_folders_tensors(family: str, tmp_path: Path) -> None:
    make_tiny(family, tmp_path)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf")
    assert same(load(open_model(path)), saved(tmp_path))


def test_transformers_reads_the_same_weights_from_a_llama_file(tmp_path: Path) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = write_gguf(make_tiny("llama2", tmp_path), tmp_path / "tiny.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    assert same(load(open_model(path)), read["tensors"])


def check_against_the_gguf_package(
    path: Path, names: dict[str, str], heads: dict[str, int], dtype: torch.dtype
) -> None:
    """Compare tensors (our name -> GGUF name) with the slow reader's, q and k rows reordered."""
    weights = load(open_model(path), dtype)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(weights) == len(tensors)
    for ours, theirs in names.items():
        tensor = tensors[theirs]
        array: npt.NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        number = heads.get(theirs.split(".")[-2])
        if number is not None:
            rows = np.arange(array.shape[0]).reshape(number, -1)
            array = array[np.concatenate([rows[:, 0::2], rows[:, 1::2]], axis=1).reshape(-1)]
        assert torch.equal(weights[ours], torch.from_numpy(array.copy()).to(dtype)), ours


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_quantized_files_equal_the_gguf_packages_reading(quantization: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    make_tiny("smollm2", tmp_path, **sizes)
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", quantization=quantization)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    check_against_the_gguf_package(path, names, {"attn_q": 4, "attn_k": 2}, torch.float32)


def test_the_real_files_weights_equal_the_gguf_packages_reading() -> None:
    names = {
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.17.self_attn.k_proj.weight": "blk.17.attn_k.weight",
        "model.layers.29.self_attn.o_proj.weight": "blk.29.attn_output.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
    }
    heads = {"attn_q": 9, "attn_k": 3}
    check_against_the_gguf_package(locate("smollm2-135m"), names, heads, torch.bfloat16)


def error_of(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        list(load_weights(open_model(folder), torch.float32, lambda done, total: None))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tensors_that_are_missing_unknown_or_misshapen_are_named(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    tensors = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    norm = "model.layers.1.input_layernorm.weight"

    save_file({n: t for n, t in tensors.items() if n != norm}, path)
    assert f"has no tensor {norm}" in error_of(tmp_path)
    save_file({**tensors, "model.layers.0.mlp.router.weight": torch.ones(3)}, path)
    assert "model.layers.0.mlp.router.weight, which a llama model" in error_of(tmp_path)
    save_file({**tensors, norm: torch.ones(3)}, path)
    assert f"tensor {norm} is [3]" in error_of(tmp_path)
    save_file({**tensors, norm: torch.ones(64, dtype=torch.float64)}, path)
    assert f"tensor {norm} has the type F64" in error_of(tmp_path)


def test_a_tensor_that_the_architecture_lacks_is_refused_in_a_gguf_file_too(
    tmp_path: Path,
) -> None:
    make_tiny("smollm2", tmp_path)
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    path = write_gguf(tmp_path, tmp_path / "tiny.gguf", extra_tensors=extra)
    assert "holds the tensor blk.0.attn_sinks.weight" in error_of(path)


def test_damaged_safetensors_files_are_named(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    for damaged, reason in {
        b"": "no safetensors header",
        whole[:5]: "no safetensors header",
        b"\xff" * 8 + whole[8:]: "no safetensors header",
        whole[:100]: "truncated inside its header",
        whole[:-1]: "truncated: ",
        whole[:8] + b"?" * length + whole[8 + length :]: "no JSON",
        whole[:8] + json.dumps({"a": {}}).encode().ljust(length) + whole[8 + length :]: "bad entry",
    }.items():
        path.write_bytes(damaged)
        message = error_of(tmp_path)
        assert str(path) in message
        assert reason in message


def test_the_index_must_name_files_that_are_there(tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path, max_shard_size="100KB")
    first, second, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    data = second.read_bytes()
    second.unlink()
    assert str(second) in error_of(tmp_path)
    second.write_bytes(first.read_bytes())
    assert "both hold" in error_of(tmp_path)
    second.write_bytes(data)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    assert "no weight_map" in error_of(tmp_path)


def test_a_folder_without_safetensors_says_what_it_needs(tmp_path: Path) -> None:
    make_tiny("smollm2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no model.safetensors" in error_of(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "convert it to safetensors" in error_of(tmp_path)
