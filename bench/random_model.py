"""Models with random weights: their shape is what takes time, not what they say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import safetensors.torch
import tokenizers
import torch

from gpu.weights.expected import expected_tensors
from trioserve.model_files import ModelConfig

# What initializes most models; activations and logits stay in range through any number of layers.
_SPREAD = 0.02
# Of Llama-3.1-8B, 2.5 GB at most.
_SHARD_TENSORS = 30
_NUMBERS = {"hidden_layers": "layers", "attention_heads": "heads", "key_value_heads": "kv_heads"}


LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    windows=(None,) * 32,
    rope_layers=(True,) * 32,
)
"""The shape of Llama-3.1-8B."""

TINY = attrs.evolve(
    LLAMA_8B,
    vocab_size=300,
    hidden_size=128,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_position_embeddings=512,
    windows=(None,) * 2,
    rope_layers=(True,) * 2,
)
"""Small enough for the emulation."""


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of ``config``, made on ``device``: norms are 1, the rest is normal."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, shape in expected_tensors(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, _SPREAD, generator=generator)


def write_model(config: ModelConfig, folder: Path, device: torch.device) -> None:
    """Write a Hugging Face folder with random bfloat16 weights and a tokenizer of bytes.

    Every byte of a text is one token, so a prompt of n ASCII characters has n tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = ((n, each.cpu()) for n, each in random_weights(config, device, torch.bfloat16))
    index: dict[str, str] = {}
    while shard := dict(itertools.islice(weights, _SHARD_TENSORS)):
        name = f"model-{len(index):05}.safetensors"
        safetensors.torch.save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
    files = {
        "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
        "config.json": {**llama_config(config), "rope_theta": config.rope_theta},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields, indent=2))
    _byte_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json of a llama in bfloat16."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
    same += ("max_position_embeddings", "tie_word_embeddings")
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
    numbers = {f"num_{name}": getattr(config, f"num_{own}") for name, own in _NUMBERS.items()}
    shape = {name: getattr(config, name) for name in same}
    return {**kind, **shape, **numbers, "hidden_act": "silu"}


def _byte_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Return the 256 bytes, and words that no text becomes but a random model may say."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab_size - len(letters))]
    vocab = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer
