"""Model folders and GGUF files: damaged ones are refused in one line, or loaded and computed."""

from __future__ import annotations

import functools
import gc
import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from gpu.loading.loading import load
from tests.fuzz.limits import address_space_bounded
from tests.fuzz.model_seeds import CONFIG, gguf_bytes, gguf_metadata, write_folder, write_gguf_bytes
from tests.fuzz.target import Target
from tests.fuzz.values import JSON, NUMBERS, TEXTS
from trioserve.config import EngineConfig
from trioserve.engine.loaded_model import LoadedModel
from trioserve.engine.worker_start import start_message
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError
from trioserve.requests.prompts import ChatPrompt

__all__ = ["TARGETS", "check_loading"]

MEMORY = 256 << 20
"""Far more than a file of kilobytes may cost, and less than any number out of one would take."""
MAX_MESSAGE_CHARACTERS = 4000


@functools.cache
def _folder() -> Path:
    """Return a folder for the files of this run, which lasts as long as the process."""
    _keep.append(tempfile.TemporaryDirectory(prefix="trioserve-fuzz-"))
    return Path(_keep[-1].name)


_keep: list[tempfile.TemporaryDirectory[str]] = []


def check_loading(path: Path) -> bool:
    """Load the model at ``path`` as the engine and its worker do; whether it could be loaded."""
    options = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_gpu_blocks_override": 4}
    config = EngineConfig(str(path), **options)
    start = start_message(config, path)
    with address_space_bounded(MEMORY):
        try:
            loaded = LoadedModel.load(config, open_model(path))
            if loaded.tokenizer.chat_template is not None:
                loaded.tokenizer.chat_template.render(ChatPrompt(messages=()))
        except ModelLoadError as error:
            _check_message(error)
            return False
        except ValueError:
            pass  # A template that can't print no message at all.
        try:
            load(start, lambda stage, done, total: None)
        except ModelLoadError as error:
            _check_message(error)
            return False
        finally:
            gc.unfreeze()  # what a worker keeps for good is this process's garbage
    return True


def _check_message(error: ModelLoadError) -> None:
    message = str(error)
    assert message.isprintable(), message
    assert len(message) < MAX_MESSAGE_CHARACTERS


def _check_gguf(data: bytes) -> None:
    path = _folder() / "fuzzed.gguf"
    path.write_bytes(data)
    check_loading(path)


@functools.cache
def _gguf_parts() -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], bytes]]]:
    return gguf_metadata(_folder() / "gguf-seed")


def _gguf_seeds() -> list[bytes]:
    whole = write_gguf_bytes(_folder() / "gguf-seed")
    return [whole, gguf_bytes(*_gguf_parts())]


@functools.cache
def _folder_parts() -> dict[str, bytes]:
    folder = write_folder(_folder() / "seed")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _check_folder(**changed: bytes) -> None:
    """Load the model whose files are ``changed``, by their names without the dots."""
    folder = _folder() / "changed"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in {**_folder_parts(), **changed}.items():
        (folder / name).write_bytes(data)
    check_loading(folder)


def _check_file(name: str) -> Callable[[bytes], None]:
    return lambda data: _check_folder(**{name: data})


def _seeds_of(name: str) -> Callable[[], list[bytes]]:
    return lambda: [_folder_parts()[name]]


# -- structures -----------------------------------------------------------------------------------

_KEYS = (
    *("general.architecture", "general.alignment", "split.count", "tokenizer.chat_template"),
    *("llama.block_count", "llama.context_length", "llama.embedding_length", "llama.expert_count"),
    *("llama.expert_used_count", "llama.expert_feed_forward_length", "llama.expert_weights_norm"),
    *("llama.attention.head_count", "llama.attention.head_count_kv", "llama.attention.key_length"),
    *("llama.attention.value_length", "llama.attention.layer_norm_rms_epsilon"),
    *("llama.attention.sliding_window", "llama.feed_forward_length", "llama.rope.freq_base"),
    *("llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *("llama.rope.scaling.original_context_length", "llama.rope.scaling.attn_factor"),
    *("llama.rope.scale_linear", "llama.rope.scaling.yarn_beta_fast"),
    *("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens"),
    *("tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.merges"),
    *("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"),
)
_WORDS = st.sampled_from(
    ("llama", "gpt2", "qwen2", "smollm3", "yarn", "linear", "tekken", "default")
)
_ARRAYS = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(lambda v: np.array(v, "<i4")),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: np.array(v, "<f4")),
    st.lists(st.booleans(), max_size=4).map(lambda v: np.array(v, bool)),
    st.just(np.zeros(300, "<f4")),
    st.just(np.full(300, 3, "<i4")),
    st.lists(TEXTS, max_size=4),
)
_ENTRIES = st.dictionaries(
    st.integers(0, 10),
    st.tuples(
        st.lists(st.sampled_from((0, 1, 3, 16, 32, 300, 2**32, 2**63)), max_size=5).map(tuple),
        st.sampled_from((0, 1, 2, 8, 12, 14, 30, 31, 99, 2**31)),
        st.sampled_from((0, 1, 2, 32, 4096, 2**40, 2**63, 2**64 - 1)),
    ),
    max_size=2,
)


def _check_gguf_parts(drawn: tuple[dict[str, Any], dict[int, Any], str | None]) -> None:
    changes, entries, renamed = drawn
    metadata, tensors = _gguf_parts()
    names = list(tensors)
    if renamed is not None:
        tensors = {**tensors, renamed: ((16,), bytes(64))}
    data = gguf_bytes(
        {**metadata, **changes}, tensors, entries={names[i]: entry for i, entry in entries.items()}
    )
    _check_gguf(data)


_EXTRA_TENSORS = st.none() | st.sampled_from(
    (
        *("blk.999999999.attn_norm.weight", "blk.1.attn_norm.weight", "rope_freqs.weight"),
        *("blk.0.attn_q.bias", "blk.-1.attn_norm.weight", "a\nb", "\x1b[2J", ""),
    )
)

_ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "short_factor"),
)
_KINDS = st.sampled_from(("linear", "dynamic", "llama3", "yarn", "longrope", "default"))
_ROPE = st.fixed_dictionaries(
    {"rope_type": _KINDS},
    optional={name: NUMBERS | JSON for name in _ROPE_FIELDS if name != "rope_type"},
)
_FAMILIES = st.sampled_from(
    ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM")
) | st.sampled_from(("Qwen3ForCausalLM", "SmolLM3ForCausalLM"))
_CONFIG_FIELDS = (
    *CONFIG,
    *("quantization_config", "hidden_act", "attention_bias", "mlp_bias", "no_rope_layers"),
    *("no_rope_layer_interval", "sliding_window", "use_sliding_window", "layer_types"),
    *("max_window_layers", "torch_dtype", "rope_scaling", "rope_theta"),
)
_CONFIGS = st.tuples(
    st.dictionaries(st.sampled_from(_CONFIG_FIELDS), NUMBERS | JSON, max_size=2),
    st.one_of(st.just({}), _ROPE.map(lambda rope: {"rope_parameters": rope})),
    st.one_of(st.just({}), _FAMILIES.map(lambda name: {"architectures": [name]})),
)
_TOKENIZER_CONFIGS = st.dictionaries(
    st.sampled_from(("chat_template", "bos_token", "eos_token")),
    JSON | st.lists(st.dictionaries(st.sampled_from(("name", "template")), JSON)),
)
_GENERATION_CONFIGS = st.dictionaries(
    st.sampled_from(
        (
            *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample"),
            "eos_token_id",
        )
    ),
    NUMBERS | JSON,
)


def _check_configs(drawn: tuple[Any, Any, Any]) -> None:
    (fields, rope, family), tokenizer, generation = drawn
    changes = {"config.json": {**CONFIG, **rope, **family, **fields}}
    if tokenizer is not None:
        changes["tokenizer_config.json"] = tokenizer
    if generation is not None:
        changes["generation_config.json"] = generation
    _check_folder(**{name: json.dumps(value).encode() for name, value in changes.items()})


_OFFSETS = st.one_of(st.tuples(NUMBERS, NUMBERS).map(list), JSON)
_SHAPES = st.one_of(st.lists(NUMBERS, max_size=4), JSON)
_TENSOR_CHANGES = st.dictionaries(
    st.integers(0, 10),
    st.dictionaries(
        st.sampled_from(("data_offsets", "shape", "dtype")),
        st.one_of(_OFFSETS, _SHAPES, st.sampled_from(("F32", "F16", "BF16", "I64", "F8_E4M3"))),
        max_size=3,
    ),
    max_size=2,
)


def _check_safetensors_header(drawn: tuple[dict[int, Any], dict[str, Any], Any]) -> None:
    changes, extra, index = drawn
    data = _folder_parts()["model.safetensors"]
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    names = list(header)
    for place, fields in changes.items():
        header[names[place]].update(fields)
    header.update(extra)
    written = json.dumps(header).encode()
    files = {"model.safetensors": struct.pack("<Q", len(written)) + written + data[8 + length :]}
    if index is not None:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    _check_folder(**files)


_INDEXES = st.none() | st.one_of(
    JSON,
    st.dictionaries(
        TEXTS,
        st.sampled_from(("model.safetensors", "/dev/zero", "../seed/model.safetensors")) | JSON,
        max_size=3,
    ),
)

TARGETS = (
    Target("gguf_file", _check_gguf, seeds=_gguf_seeds),
    Target(
        "gguf_header",
        _check_gguf_parts,
        st.tuples(
            st.dictionaries(
                st.sampled_from(_KEYS), st.one_of(NUMBERS, _WORDS, _ARRAYS, TEXTS), max_size=3
            ),
            _ENTRIES,
            _EXTRA_TENSORS,
        ),
    ),
    Target(
        "safetensors_file",
        _check_file("model.safetensors"),
        seeds=_seeds_of("model.safetensors"),
    ),
    Target(
        "safetensors_header",
        _check_safetensors_header,
        st.tuples(_TENSOR_CHANGES, st.dictionaries(TEXTS, JSON, max_size=2), _INDEXES),
    ),
    Target("tokenizer_json", _check_file("tokenizer.json"), seeds=_seeds_of("tokenizer.json")),
    Target("config_json", _check_file("config.json"), seeds=_seeds_of("config.json")),
    Target(
        "configuration",
        _check_configs,
        st.tuples(_CONFIGS, st.none() | _TOKENIZER_CONFIGS, st.none() | _GENERATION_CONFIGS),
    ),
)

torch.set_num_threads(1)
