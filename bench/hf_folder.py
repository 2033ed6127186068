"""The default model as a Hugging Face folder, for peers that don't read its GGUF file well.

The weights are those of the GGUF file, dequantized; the tokenizer is ours, because transformers
builds another pre-tokenizer from this file. No id ends a sequence in this folder: both sides of a
comparison are to produce every token asked for.

``python -m bench.hf_folder MODEL FOLDER`` writes it. Comparisons do that in a process of its own,
because a page of torch's library that they had in memory would count less for the servers.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelConfig, ModelFiles, locate, open_model

__all__ = ["write_folder"]

_NO_TOKEN = -1


def write_folder(model: str, folder: Path) -> Path:
    """Write ``model`` to ``folder`` in bfloat16, unless it is already there in full.

    Raises:
        ValueError: the model isn't of the plain llama family.
        ModelLoadError: the model can't be read.
    """
    if folder.exists():
        return folder
    files = open_model(locate(model))
    config = files.config
    if config.family != "llama" or config.rope_scaling is not None:
        raise ValueError(f"only plain llama models are converted, {model} is {config.family}")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = dict(load_weights(files, torch.bfloat16, lambda done, total: None))
    safetensors.torch.save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    files.load_tokenizer().save(str(part / "tokenizer.json"))
    _write(part / "config.json", _config(config))
    _write(part / "generation_config.json", {"eos_token_id": _NO_TOKEN, "do_sample": False})
    _write(part / "tokenizer_config.json", _tokenizer_config(files))
    part.rename(folder)
    return folder


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2))


def _config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": config.bos_token_id,
        "eos_token_id": None,
    }


def _tokenizer_config(files: ModelFiles) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "pad_token": files.eos_token,
        "chat_template": files.chat_template,
        "model_max_length": files.config.max_position_embeddings,
    }


if __name__ == "__main__":
    write_folder(sys.argv[1], Path(sys.argv[2]))
