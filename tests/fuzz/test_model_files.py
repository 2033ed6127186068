"""Malformed model files: an error of one line, and no more memory than the file is large."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.weights.tensors import load_weights
from tests.fuzz.model_files import check_loading
from tests.fuzz.model_seeds import CONFIG, gguf_bytes, gguf_metadata, write_folder
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError

FLOATS = np.zeros(300, np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return gguf_metadata(tmp_path_factory.mktemp("gguf"))


def error_of(path: Path) -> str:
    """Return what is said of the model at ``path``, which must be refused."""
    with pytest.raises(ModelLoadError) as caught:
        files = open_model(path)
        files.load_tokenizer()
        list(load_weights(files, torch.float32, lambda done, total: None))
    message = str(caught.value)
    assert message.isprintable()
    return message


def peak_bytes(path: Path) -> int:
    """Return the peak memory of reading the refused model at ``path``."""
    error_of(path)  # what is imported with the first one isn't counted
    tracemalloc.start()
    try:
        error_of(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_models_to_be_damaged_can_be_loaded(folder: Path, parts: Any, tmp_path: Path) -> None:
    assert check_loading(folder)
    path = tmp_path / "whole.gguf"
    path.write_bytes(gguf_bytes(*parts))
    assert check_loading(path)


# --- GGUF ---


def header(num_tensors: int, num_entries: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


@pytest.mark.parametrize(
    "data",
    [
        header(2**64 - 1, 0),
        header(0, 2**64 - 1),
        header(0, 1, struct.pack("<Q", 2**63)),
        header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**64 - 1)),
        header(0, 1, text("a") + struct.pack("<IIQ", 9, 6, 2**62)),
        header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 2**62)),
        header(1, 0, text("a") + struct.pack("<I", 2**32 - 1)),
        header(1, 0, text("a") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0)),
    ],
)
def test_counts_that_the_file_has_no_room_for(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "counts.gguf"
    path.write_bytes(data + bytes(64))
    # What the file is read through, and little more.
    assert peak_bytes(path) < 2 << 20


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (header(2**31, 0), "it has 2147483648 tensors, and at most 131072 are read"),
        (header(0, 2**31), "it has 2147483648 entries, and at most 65536 are read"),
        (
            header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 2**31)),
            "an array of 2147483648 texts",
        ),
        (header(0, 1, text("a") + struct.pack("<IIQ", 9, 6, 2**31)), "more than 268435456 bytes"),
        (header(0, 1, text("a") + struct.pack("<IQ", 8, 2**31)), "more than 268435456 bytes"),
    ],
)
def test_counts_that_a_sparse_file_has_room_for(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(data)
    os.truncate(path, 64 << 30)
    assert peak_bytes(path) < 2 << 20
    assert reason in error_of(path)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": FLOATS}, "general.architecture has the wrong type"),
        ({"general.alignment": "32"}, "its alignment is 32"),
        ({"general.alignment": 2}, "its alignment is 2"),
        ({"split.count": "2"}, "split GGUF"),
        ({"llama.expert_count": FLOATS + 1}, "llama.expert_count = 1.0"),
        ({"llama.block_count": 10**9}, "llama.block_count = 1000000000"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon = nan"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base = inf"),
        ({"llama.rope.scaling.type": FLOATS}, "llama.rope.scaling.type has the wrong type"),
        ({"llama.rope.scale_linear": "4"}, "llama.rope.scale_linear = 4"),
        ({"llama.attention.sliding_window": -1.5}, "sliding_window = -1.5"),
        ({"llama.attention.head_count_kv": 3}, "2 heads can't share 3 heads"),
        ({"llama.context_length": 2**40}, "context_length = 1099511627776"),
        ({"tokenizer.ggml.model": FLOATS}, "tokenizer.ggml.model has the wrong type"),
        ({"tokenizer.ggml.pre": FLOATS}, "tokenizer.ggml.pre has the wrong type"),
        ({"tokenizer.ggml.add_bos_token": FLOATS}, "add_bos_token has the wrong type"),
        ({"general.architecture": "a\nb\x1b[2J"}, r"a\nb\x1b[2J isn't served"),
    ],
)
def test_metadata_of_the_wrong_type_or_size(
    metadata: dict[str, Any], reason: str, parts: Any, tmp_path: Path
) -> None:
    known, tensors = parts
    path = tmp_path / "wrong.gguf"
    path.write_bytes(gguf_bytes({**known, **metadata}, tensors))
    assert reason in error_of(path)


def test_a_layer_of_any_number_makes_no_model_of_so_many(parts: Any, tmp_path: Path) -> None:
    metadata, tensors = parts
    last = {"blk.999999999.attn_norm.weight": ((16,), bytes(64))}
    path = tmp_path / "layers.gguf"
    path.write_bytes(gguf_bytes({**metadata, "llama.block_count": 10**9}, {**tensors, **last}))
    assert peak_bytes(path) < 4 << 20


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (((16, 16), 0, 0), "overlap"),
        (((16, 16), 0, 20), "isn't aligned"),
        (((16, 16), 0, 2**63), "truncated"),
        (((2**32, 2**32), 0, 0), "truncated"),
        (((16, 16), 99, 0), "number 99"),
        (((16, 15), 2, 0), "no whole blocks"),
        (((), 0, 0), "no whole blocks"),
    ],
)
def test_tensors_that_lie_where_they_can_not(
    entry: Any, reason: str, parts: Any, tmp_path: Path
) -> None:
    path = tmp_path / "tensors.gguf"
    path.write_bytes(gguf_bytes(*parts, entries={"blk.0.attn_q.weight": entry}))
    assert reason in error_of(path)


def test_a_file_that_is_cut_short_while_it_is_read(parts: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    whole = gguf_bytes(*parts)
    path.write_bytes(whole)
    files = open_model(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match="was cut short"):
        list(load_weights(files, torch.float32, lambda done, total: None))


def test_pieces_too_long_to_be_cut_in_all_ways(parts: Any, tmp_path: Path) -> None:
    metadata, tensors = parts
    tokens = [*metadata["tokenizer.ggml.tokens"][:-1], "a" * 100_000]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": FLOATS,
    }
    path = tmp_path / "pieces.gguf"
    path.write_bytes(gguf_bytes({**metadata, **changes}, tensors))
    assert "a piece of 100000 characters" in error_of(path)


# --- folders ---


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"max_position_embeddings": 2**63}, "max_position_embeddings = 9223372036854775808"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rope_theta": 10**400, "rope_parameters": None}, "has rope_theta = 1000"),
        ({"eos_token_id": [-1]}, "eos_token_id = [-1]"),
        ({"head_dim": 7}, "heads of 7 numbers"),
        ({"num_key_value_heads": 3}, "2 heads can't share 3"),
        ({"architectures": ["Lla\x7fma"]}, r"Lla\x7fma isn't served"),
        (
            {"rope_parameters": {"rope_type": "yarn", "attention_factor": [1]}},
            "attention_factor = [1]",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e300}}, "factor = 1e+300"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
            | {"sliding_window": 8, "max_window_layers": "all"},
            "max_window_layers = 'all'",
        ),
    ],
)
def test_configurations_of_the_wrong_type_or_size(
    changes: dict[str, Any], reason: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    assert reason in error_of(folder)


def test_json_that_is_nested_too_deeply(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    assert "nested too deeply" in error_of(folder)


def test_defaults_that_no_request_may_have(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": NaN}')
    assert "temperature must be" in error_of(folder)


def test_templates_with_names_that_are_no_names(folder: Path) -> None:
    named = [{"name": {}, "template": 1}, {"name": "default", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_model(folder).chat_template == "x"


@pytest.mark.parametrize("name", ["/dev/zero", "../model.safetensors", "a" * 300, "\0", 7, None])
def test_an_index_that_leads_out_of_its_folder(name: Any, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert "no name of a file in its folder" in error_of(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_to_a_device_is_not_read(name: str, folder: Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    error_of(folder)


def rewritten(folder: Path, **changes: Any) -> None:
    """Change the entry of one tensor in the header of the folder's weights."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entries = json.loads(data[8 : 8 + length])
    entries["model.norm.weight"].update(changes)
    written = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + length :])


@pytest.mark.parametrize(
    "changes",
    [
        {"data_offsets": [0, 64]},
        {"data_offsets": [64, 0]},
        {"data_offsets": [-64, 0]},
        {"data_offsets": [float("-inf"), 64]},
        {"data_offsets": [0]},
        {"shape": [float("inf")]},
        {"shape": [2**62, 2**62]},
        {"shape": ["16"]},
        {"shape": None},
        {"dtype": 7},
    ],
)
def test_entries_that_can_not_be(changes: dict[str, Any], folder: Path) -> None:
    rewritten(folder, **changes)
    assert "a bad entry in its header" in error_of(folder)


def test_a_shard_that_is_cut_short_while_it_is_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_weights(open_model(folder), torch.float32, lambda done, total: None)
    next(weights)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match="was cut short"):
        list(weights)
