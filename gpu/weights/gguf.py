"""Weights from a GGUF file, with Hugging Face's names and order of rows, dequantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.weights.blocks import BFLOAT16, FLOAT32, Blocks, Weight
from gpu.weights.dequantize import dequantize
from gpu.weights.expected import check_tensors, expected_tensors
from gpu.weights.experts import split_experts
from gpu.weights.reading import read_bytes
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.model_files.gguf_header import TensorType
from trioserve.protocol.errors import ModelLoadError

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_OF_ONE_EXPERT = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
"""Names in early Mixtral files, with one tensor for each expert."""
_PERMUTED_FAMILIES = ("llama", "mixtral", "smollm3")
_ROPE_FACTORS = "rope_freqs.weight"  # part of the configuration, not of the weights


def load(
    files: ModelFiles,
    dtype: np.dtype[Any] | None,
    progress: Callable[[int, int], None],
    keep: Collection[str] = (),
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Weight]]:
    """Yield the weights of a GGUF file; see :func:`gpu.weights.read_weights`."""
    header = files.gguf_header
    if header is None:
        raise ValueError(f"{files.path} was not opened as a GGUF file")
    tensors = {
        hugging_face_name(name): tensor
        for name, tensor in header.tensors.items()
        if name != _ROPE_FACTORS
    }
    expected = expected_tensors(files.native)
    parts = {name: split_experts(name, tensor.shape, expected) for name, tensor in tensors.items()}
    found: dict[str, tuple[int, ...]] = {}
    for names, shape in parts.values():
        for name in names:
            if name in found:
                raise ModelLoadError(f"{files.path} holds {name} twice: fetch it again")
            found[name] = shape
    check_tensors(expected, found, files.path, files.native.family)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    done = 0
    try:
        with files.path.open("rb", buffering=0) as file:
            for stored, tensor in tensors.items():
                names, shape = parts[stored]
                num_bytes = tensor.num_bytes // len(names)
                for index, name in enumerate(names):
                    done += num_bytes
                    if not wanted(name):
                        progress(done, total)
                        continue
                    raw = read_bytes(files.path, file, tensor.offset + index * num_bytes, num_bytes)
                    heads = _permuted_heads(name, files.native)
                    if tensor.type.name in keep and len(shape) == 2:
                        yield name, _kept(raw, tensor.type, shape, heads)
                    else:
                        numbers = dequantize(raw, tensor.type, dtype or _unrounded(tensor.type))
                        value = numbers.reshape(shape)
                        yield name, value if heads is None else unpermute(value, heads)
                    progress(done, total)
    except OSError as error:
        raise ModelLoadError(f"{files.path} can't be read: {error.strerror}") from error


def _kept(
    raw: npt.NDArray[np.uint8], type_: TensorType, shape: tuple[int, ...], heads: int | None
) -> Blocks:
    """Return the blocks of a matrix, with its rows in Hugging Face's order."""
    rows = raw.reshape(shape[0], -1)
    raw = rows if heads is None else unpermute(rows, heads)
    return Blocks(type_, shape, raw)


def _unrounded(type_: TensorType) -> np.dtype[Any]:
    return BFLOAT16 if type_.name == "BF16" else FLOAT32


def hugging_face_name(name: str) -> str:
    """Return ``model.layers.3.self_attn.q_proj.weight`` for ``blk.3.attn_q.weight``, and so on.

    Unknown names are returned unchanged.
    """
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _OUTER:
        return f"{_OUTER[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER:
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    if len(parts) == 5 and parts[0] == "blk" and parts[2] in _OF_ONE_EXPERT:
        stem = f"model.layers.{parts[1]}.mlp.experts.{parts[3]}"
        return f"{stem}.{_OF_ONE_EXPERT[parts[2]]}.{parts[4]}"
    return name


def _permuted_heads(name: str, config: ModelConfig) -> int | None:
    """Return the number of heads if GGUF permutes the rows of this tensor; None otherwise."""
    if config.family not in _PERMUTED_FAMILIES:
        return None
    if ".self_attn.q_proj." in name:
        return config.num_heads
    if ".self_attn.k_proj." in name:
        return config.num_kv_heads
    return None


def unpermute(tensor: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Return a q or k projection, [num_heads * head_dim, ...], with rows in Hugging Face's order.

    RoPE in llama.cpp's llama-like models rotates neighbouring pairs of a head, and Hugging Face
    pairs its halves. The conversion to GGUF therefore interleaves the halves.
    """
    rows = tensor.shape[0]
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
