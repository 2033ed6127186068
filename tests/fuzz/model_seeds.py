"""The smallest models that can be loaded, to be damaged: a folder, and a GGUF file of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import VOCAB_SIZE, write_tokenizer
from trioserve.model_files.gguf_header import read_header

__all__ = ["CONFIG", "HIDDEN", "gguf_bytes", "gguf_metadata", "write_folder", "write_gguf_bytes"]

HIDDEN, INNER, HEADS, KV_HEADS = 16, 16, 2, 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tensors() -> dict[str, Any]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    chance = np.random.default_rng(0)
    return {name: chance.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder: Path) -> Path:
    """Return a model in ``folder``, with every file that is read; returns ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.7, "top_k": 40, "eos_token_id": [2, 0]})
    )
    (folder / "model.safetensors").write_bytes(save(_tensors()))
    write_tokenizer(folder)
    return folder


def write_gguf_bytes(folder: Path) -> bytes:
    """Return the same model as the bytes of a GGUF file, which is written into ``folder``."""
    return write_gguf(write_folder(folder), folder / "model.gguf").read_bytes()


def gguf_metadata(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], bytes]]]:
    """Metadata and tensors (shape and float32 numbers) of that file."""
    data = write_gguf_bytes(folder)
    header = read_header(folder / "model.gguf")
    tensors = {
        name: (tensor.shape, data[tensor.offset : tensor.offset + tensor.num_bytes])
        for name, tensor in header.tensors.items()
    }
    return header.metadata, tensors


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], bytes]],
    *,
    entries: Mapping[str, tuple[tuple[int, ...], int, int]] | None = None,
) -> bytes:
    """Return a GGUF file whose header names ``entries`` (shape, type, offset)."""
    keys = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    body, table = b"", b""
    for name, (shape, numbers) in tensors.items():
        shape, kind, offset = (entries or {}).get(name, (shape, 0, len(body)))
        dimensions = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        table += _text(name) + struct.pack("<I", len(shape)) + dimensions
        table += struct.pack("<IQ", kind, offset)
        body += numbers + bytes(-len(numbers) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + table
    return start + bytes(-len(start) % 32) + body


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Type and value, as llama.cpp would choose the type; what has none becomes a text."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int() if 0 <= value < 2**32:
            return struct.pack("<II", 4, value)
        case int() if 0 <= value < 2**64:
            return struct.pack("<IQ", 10, value)
        case int() if -(2**63) <= value < 0:
            return struct.pack("<Iq", 11, value)
        case float():
            return struct.pack("<Id", 12, value)
        case np.ndarray():
            kinds = {"u1": 0, "i1": 1, "i4": 5, "f4": 6, "u4": 4, "i8": 11, "b1": 7, "f8": 12}
            kind = kinds[value.dtype.str[1:]]
            return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()
        case list():
            texts = b"".join(_text(str(item)) for item in value)
            return struct.pack("<IIQ", 9, 8, len(value)) + texts
    return struct.pack("<I", 8) + _text(str(value))
