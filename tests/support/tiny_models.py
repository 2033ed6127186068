"""Small random models on disk, one per family: for tests that need a model and not its words.

The weights are drawn with a fixed seed and large enough that attention and logits have a shape of
their own: norms aren't all ones, biases aren't zero, and no two families share a forward pass.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import tokenizers

__all__ = [
    "CHAT_TEMPLATE",
    "EXPERT_FAMILIES",
    "FAMILIES",
    "make_tiny",
    "tiny_tokenizer",
    "write_tokenizer",
]

VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    *("Ġthe", "Ġand", "Ġof", "Ġto", "in", "er", "Ġthere", "Ġon", "re", "Ġworld", "Ġhello"),
    *("Ġis", "Ġing", "at", "en", "Ġcat", "Ġyou", "Ġme", "Ġdog", "Ġhouse"),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def _rope(kind: str = "default", theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**_rope(), "rms_norm_eps": 1e-5, "head_dim": 16}),
    "llama3": (
        "Llama",
        {
            **_rope(
                "llama3",
                500000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama_linear": ("Llama", _rope("linear", factor=4.0)),
    "llama_dynamic": ("Llama", _rope("dynamic", factor=4.0)),
    "llama_yarn": ("Llama", _rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "smollm2": ("Llama", {**_rope(theta=100000.0), "tie_word_embeddings": True}),
    "smollm3": (
        "SmolLM3",
        {
            **_rope(theta=2000000.0),
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {**_rope(), "sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2", _rope(theta=1000000.0)),
    "qwen2_window": (
        "Qwen2",
        {
            **_rope(theta=1000000.0),
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("Qwen3", {**_rope(theta=1000000.0), "head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 48, "pad_token_id": 0}),
    "mixtral": (
        "Mixtral",
        {**_rope(theta=1000000.0), "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_rope(theta=1000000.0),
            "num_hidden_layers": 3,
            "head_dim": 32,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
}
"""Family name -> (the prefix of transformers' classes, fields of its configuration)."""
EXPERT_FAMILIES = {"mixtral", "qwen3_moe"}
"""Families with five experts, of which each token uses some."""


def make_tiny(
    family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """Write a model of ``family`` into ``folder``: config.json, float32 weights, tokenizer.

    ``overrides`` are fields of transformers' configuration. ``max_shard_size`` as in transformers,
    e.g. ``"100KB"`` for several safetensors files with an index. Returns ``folder``.
    """
    import torch
    import transformers

    prefix, fields = FAMILIES[family]
    fields = {**_SIZES, **fields, **overrides}
    if family == "phi3":
        fields |= _phi3_fields(**fields)
    config = getattr(transformers, f"{prefix}Config")(**fields)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(0.0, 0.3)
                elif "norm" in name:
                    parameter.normal_(1.0, 0.2)
                elif name.endswith("mlp.gate.weight"):
                    # A choice among experts that is seldom close: rounding hardly changes it, and
                    # where it does, it is between two that matter little.
                    parameter.normal_(0.0, 6.4 / math.sqrt(parameter.shape[1]))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def _phi3_fields(
    hidden_size: int, num_attention_heads: int, head_dim: int = 0, **_: Any
) -> dict[str, Any]:
    """Return the heads and the rotation of a model whose head size is given by their number."""
    head_dim = head_dim or hidden_size // num_attention_heads
    num_heads = hidden_size // head_dim
    num_frequencies = int(head_dim * 0.75) // 2
    rope = _rope(
        "longrope",
        partial_rotary_factor=0.75,
        short_factor=[1.0 + number / 8 for number in range(num_frequencies)],
        long_factor=[2.0 + number for number in range(num_frequencies)],
    )
    return {
        **rope,
        "original_max_position_embeddings": 256,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(num_heads // 2, 1),
    }


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE of 300 tokens: three special ones, 256 bytes, 41 merges."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(letters)))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab and len(vocab) < VOCAB_SIZE:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(token, special=True) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into ``folder``."""
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
