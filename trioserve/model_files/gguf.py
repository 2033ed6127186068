"""The metadata of a GGUF file: the model's shape, special tokens and chat template.

ggml's gguf.md describes the keys. Meanings and defaults follow llama.cpp.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from trioserve.model_files.config import (
    MAX_LAYERS,
    MAX_NUMBER,
    MAX_SIZE,
    ExpertsConfig,
    ModelConfig,
    RopeScaling,
    check_config,
)
from trioserve.model_files.gguf_header import GGUFHeader, GGUFTensor
from trioserve.protocol.errors import ModelLoadError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "smollm3")

CONTROL = 3
"""Value of a control token in ``tokenizer.ggml.token_type``."""

# Files often name only one end. These tokens end a turn or text in every model that has them.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_SMOLLM3_NO_ROPE_INTERVAL = 4  # without a key; llama.cpp has this constant too
_FLOATS = {"F32": "float32", "F16": "float16"}
# Unsupported properties of experts, with the values that mean their absence.
_PLAIN_EXPERTS: dict[str, tuple[float, ...]] = {
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # 1 is softmax
}
_REQUIRED = ("token_embd.weight", "output_norm.weight")


class _Keys:
    """Metadata below the architecture's prefix, each value checked when it is read."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self.prefix = architecture

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to ``most``. An array must have the same one for every layer."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.error(key, value)
        return value

    def positive(self, key: str) -> int | None:
        """Return a positive integer; None for 0 or a missing key."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and value == 0):
            return None
        return self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, value)
        if not 0 < value <= MAX_NUMBER:  # Also refuses NaN.
            raise self.error(key, value)
        return float(value)

    def error(self, key: str, value: object) -> ModelLoadError:
        path = self.header.path
        if value is None:
            return ModelLoadError(f"{path} has no {self.prefix}.{key}: convert the model again")
        return ModelLoadError(
            f"{path} has {self.prefix}.{key} = {value}, which isn't served: use another file"
        )


def read_gguf_config(header: GGUFHeader) -> ModelConfig:
    """Return the shape of the model in a GGUF file.

    Raises:
        ModelLoadError: The architecture isn't supported, or a key or tensor is missing or wrong.
    """
    architecture = header.text("general.architecture")
    if architecture is None or architecture not in ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: the architecture {architecture} isn't served; "
            f"{', '.join(ARCHITECTURES)} are"
        )
    for name in _REQUIRED:
        if name not in header.tensors:
            raise ModelLoadError(f"{header.path} has no tensor {name}: convert the model again")
    keys = _Keys(header, architecture)
    num_layers = keys.integer("block_count", most=MAX_LAYERS)
    if f"blk.{num_layers - 1}.attn_norm.weight" not in header.tensors:
        raise keys.error("block_count", num_layers)
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(key, keys.get(key))
    no_rope_interval = _SMOLLM3_NO_ROPE_INTERVAL if architecture == "smollm3" else num_layers + 1
    window = keys.positive("attention.sliding_window") if architecture == "llama" else None
    max_positions = keys.integer("context_length")
    scaling = _rope_scaling(keys, max_positions)
    if scaling is not None:
        max_positions = scaling.stretched(max_positions)
    embeddings = header.tensors["token_embd.weight"]
    experts = _experts(keys, num_layers)
    config = ModelConfig(
        family=_family(keys, experts),
        vocab_size=embeddings.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        output_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        experts=experts,
        windows=(window,) * num_layers,
        rope_layers=tuple((layer + 1) % no_rope_interval != 0 for layer in range(num_layers)),
        dtype=_dtype(header),
        bos_token_id=_token_id(header, "bos"),
        eos_token_ids=_eos_ids(header),
    )
    check_config(config, header.path)
    return config


def _family(keys: _Keys, experts: ExpertsConfig | None) -> str:
    """Return the family, as :class:`ModelConfig` names it."""
    if keys.prefix == "qwen3moe":
        return "qwen3_moe"
    if experts is None:
        return keys.prefix
    if keys.prefix != "llama":
        raise keys.error("expert_count", experts.count)
    return "mixtral"


def _experts(keys: _Keys, num_layers: int) -> ExpertsConfig | None:
    count = keys.positive("expert_count")
    if count is None:
        return None
    for key, plain in _PLAIN_EXPERTS.items():
        value = keys.get(key)
        if value is not None and (isinstance(value, np.ndarray) or value not in plain):
            raise keys.error(key, value)
    # llama.cpp's default for both architectures.
    normalized = keys.get("expert_weights_norm")
    if normalized is not None and not isinstance(normalized, bool):
        raise keys.error("expert_weights_norm", normalized)
    size = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    tensors = keys.header.tensors
    return ExpertsConfig(
        count=count,
        per_token=keys.integer("expert_used_count"),
        intermediate_size=size,
        normalized=normalized is not False,
        layers=tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(num_layers)),
    )


def _rope_scaling(keys: _Keys, max_positions: int) -> RopeScaling | None:
    factors = keys.header.tensors.get("rope_freqs.weight")
    kind = keys.header.text(f"{keys.prefix}.rope.scaling.type") or "none"
    # Old files have only the linear factor, under another key.
    old_factor = keys.number("rope.scale_linear", 1.0)
    if kind == "none" and old_factor != 1.0:
        kind = "linear"
    if factors is not None:
        if kind != "none":
            raise keys.error("rope.scaling.type", f"{kind} beside rope_freqs.weight")
        return RopeScaling(kind="factors", frequency_factors=_read_floats(keys, factors))
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", kind)
    factor = keys.number("rope.scaling.factor", None if old_factor == 1.0 else old_factor)
    original = keys.integer("rope.scaling.original_context_length", max_positions)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor, original_max_position_embeddings=original)
    # llama.cpp multiplies YaRN's magnitude by this number instead of replacing it.
    magnitude = keys.number("rope.scaling.attn_factor", 1.0)
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=magnitude * (0.1 * math.log(factor) + 1.0) if magnitude != 1.0 else None,
    )


def _read_floats(keys: _Keys, tensor: GGUFTensor) -> tuple[float, ...]:
    if tensor.type.name != "F32":
        raise keys.error("rope_freqs.weight", tensor.type.name)
    with keys.header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    if len(data) < tensor.num_bytes:
        raise keys.error("rope_freqs.weight", "cut short")
    return tuple(np.frombuffer(data, "<f4").tolist())


def _dtype(header: GGUFHeader) -> str:
    """Return the number format of most matrices; bfloat16 if they are quantized."""
    counts = Counter(t.type.name for t in header.tensors.values() if len(t.shape) > 1)
    return _FLOATS.get(max(counts, key=counts.__getitem__, default=""), "bfloat16")


def _token_id(header: GGUFHeader, name: str) -> int | None:
    value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = header.texts("tokenizer.ggml.tokens")
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < len(tokens) else None


def _eos_ids(header: GGUFHeader) -> tuple[int, ...]:
    """Return the ids that end a sequence: those in the metadata, then known control tokens."""
    named = (_token_id(header, name) for name in ("eos", "eot", "eom"))
    ids = [token for token in named if token is not None]
    tokens = header.texts("tokenizer.ggml.tokens")
    control = np.flatnonzero(header.numbers("tokenizer.ggml.token_type") == CONTROL).tolist()
    ids += [token for token in control if token < len(tokens) and tokens[token] in _END_TOKENS]
    return tuple(dict.fromkeys(ids))


def read_chat_template(header: GGUFHeader) -> str | None:
    """Return the default chat template; None if the file has none."""
    template = header.metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def read_token_text(header: GGUFHeader, token: int | None) -> str | None:
    """Return the text of a special token, for the chat template."""
    tokens = header.texts("tokenizer.ggml.tokens")
    return tokens[token] if token is not None and token < len(tokens) else None
