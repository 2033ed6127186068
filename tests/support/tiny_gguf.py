"""GGUF files for the tests, written with the gguf package the way llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

__all__ = ["permute", "random_blocks", "write_gguf"]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
}
_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe"}
_EXPERTS = {
    **{"w1": "gate", "w3": "up", "w2": "down"},
    **{f"{part}_proj": part for part in ("gate", "up", "down")},
}
_UNQUANTIZABLE = ("Q4_K", "Q6_K")  # the gguf package only reads these


def write_gguf(
    folder: Path,
    path: Path,
    *,
    quantization: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, npt.NDArray[np.float32]] | None = None,
    exceptions: dict[str, str] | None = None,
    stacked: bool = True,
) -> Path:
    """Convert the tiny model in ``folder`` to the GGUF file ``path``; returns ``path``.

    Matrices get the type ``quantization``; for a type that the gguf package can't write, they get
    random blocks. ``exceptions`` are the types of some, by a part of their names. ``metadata`` adds
    keys (without the architecture's prefix, floats and ints). Experts are ``stacked``, a layer's in
    one tensor, or each apart.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_config(writer, config)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.{key}", value)
    _write_tokenizer(writer, folder)
    tensors = _experts(load_file(folder / "model.safetensors"), stacked=stacked)
    for name, array in tensors.items():
        heads = _heads(name, config) if architecture in ("llama", "smollm3") else None
        array = array if heads is None else permute(array, heads)
        types = [kind for part, kind in (exceptions or {}).items() if part in _gguf_name(name)]
        _write_tensor(writer, _gguf_name(name), array, [*types, quantization][0])
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """llama.cpp's reordering of the rows of a query or key projection."""
    split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(array.shape))


def random_blocks(
    quantization: str, num_blocks: int, seed: int = 0
) -> tuple[npt.NDArray[np.uint8], gguf.GGMLQuantizationType]:
    """``[num_blocks, block_bytes]`` random bytes of a type, with scales that are small numbers."""
    kind = gguf.GGMLQuantizationType[quantization]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    halves = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
    for start in halves.get(quantization, []):
        scales = rng.normal(0.0, 0.01, (num_blocks, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    if quantization == "F32":
        blocks = rng.normal(size=(num_blocks, 1)).astype(np.float32).view(np.uint8)
    if quantization == "BF16":
        floats = rng.normal(size=(num_blocks, 1)).astype(np.float32)
        blocks = np.ascontiguousarray(floats.view(np.uint8)[:, 2:])
    return blocks, kind


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        if inner[-1].isdecimal():  # an expert that isn't stacked
            _, part, number = inner.split(".")
            return f"blk.{layer}.ffn_{part}.{number}.{ending}"
        return f"blk.{layer}.{_NAMES[inner]}.{ending}"
    return f"{_NAMES[stem]}.{ending}"


def _experts(tensors: dict[str, npt.NDArray[Any]], *, stacked: bool) -> dict[str, npt.NDArray[Any]]:
    """With experts as ``mlp.experts.gate``, those of a layer in one tensor, or ``mlp.gate.3``."""
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        stem, experts, inner = name.partition(".mlp.experts.")
        if not experts:
            found[name] = array
            continue
        number, part, _ = inner.split(".")
        if stacked:
            found.setdefault(f"{stem}{experts}{_EXPERTS[part]}.weight", []).append(array)
        else:
            found[f"{stem}.mlp.{_EXPERTS[part]}.{number}.weight"] = array
    return {
        name: np.stack(array) if isinstance(array, list) else array for name, array in found.items()
    }


def _heads(name: str, config: dict[str, Any]) -> int | None:
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None


def _write_tensor(
    writer: gguf.GGUFWriter, name: str, array: npt.NDArray[np.float32], quantization: str
) -> None:
    if array.ndim == 1 or quantization == "F32":
        writer.add_tensor(name, array)
    elif quantization in _UNQUANTIZABLE:
        numbers = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quantization]][0]
        blocks, kind = random_blocks(quantization, array.size // numbers, seed=len(name))
        writer.add_tensor(name, blocks.reshape(array.shape[0], -1), raw_dtype=kind)
    else:
        kind = gguf.GGMLQuantizationType[quantization]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] in ("mistral", "mixtral") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab["<|im_start|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template)
