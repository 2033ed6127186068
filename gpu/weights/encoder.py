"""Reads the tensors of an encoder and maps the names in its files to common ones.

All families get the names of RoBERTa's classifier without the model's prefix, such as
``encoder.layer.0.attention.self.query.weight`` and ``classifier.out_proj.bias``. The linear layers
that sentence-transformers puts behind the pooling are ``dense.0.weight``, ``dense.0.bias``, ….
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gpu.weights.blocks import Numbers
from gpu.weights.safetensors import load_folder
from trioserve.model_files import EncoderConfig, EncoderFiles
from trioserve.model_files.encoder_config import Dense

RELATIVE_BIAS = "encoder.relative_attention_bias.weight"

_PREFIX = re.compile(r"^(bert|distilbert|mpnet|roberta)\.")
_LEFT_OUT = (
    "embeddings.position_ids",  # 0, 1, 2, …: stored by old versions
    *("cls.", "lm_head.", "vocab_layer_norm.", "vocab_projector.", "vocab_transform."),
)
"""Prefixes of tensors that no embedding or label depends on, mostly of the language-model head."""
_POOLER = "pooler."
_Renames = tuple[tuple[str, str], ...]
_BERT_CLASSIFIER: _Renames = (
    (r"^classifier\.", "classifier.out_proj."),
    (r"^pooler\.dense\.", "classifier.dense."),
)
_DISTILBERT: _Renames = (
    (r"^transformer\.", "encoder."),
    (r"\.attention\.out_lin\.", ".attention.output.dense."),
    (r"\.attention\.q_lin\.", ".attention.self.query."),
    (r"\.attention\.k_lin\.", ".attention.self.key."),
    (r"\.attention\.v_lin\.", ".attention.self.value."),
    (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
    (r"\.ffn\.lin1\.", ".intermediate.dense."),
    (r"\.ffn\.lin2\.", ".output.dense."),
    (r"\.output_layer_norm\.", ".output.LayerNorm."),
    (r"^classifier\.", "classifier.out_proj."),
    (r"^pre_classifier\.", "classifier.dense."),
)
_MPNET: _Renames = (
    (r"\.attention\.attn\.q\.", ".attention.self.query."),
    (r"\.attention\.attn\.k\.", ".attention.self.key."),
    (r"\.attention\.attn\.v\.", ".attention.self.value."),
    (r"\.attention\.attn\.o\.", ".attention.output.dense."),
    (r"\.attention\.LayerNorm\.", ".attention.output.LayerNorm."),
)
_TENSORFLOW: _Renames = (
    (r"\.LayerNorm\.gamma$", ".LayerNorm.weight"),
    (r"\.LayerNorm\.beta$", ".LayerNorm.bias"),
)
"""Names in files converted from TensorFlow."""


def read_encoder_weights(
    files: EncoderFiles, dtype: np.dtype[Any], progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Numbers]]:
    """Yield ``(name, numbers)`` for each tensor of the model, in ``dtype``.

    The encoder's tensors come first, then the linear layers behind the pooling. ``progress`` is
    called after each of the former with the bytes read so far and in total.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape (raised before the first
            of its folder is yielded), or a file is damaged.
    """
    config = files.config

    def named(stored: str) -> str | None:
        return name_of(stored, config)

    yield from load_folder(
        files.path, encoder_tensors(config), named, config.family, dtype, progress
    )
    for index, dense in enumerate(config.dense):
        for name, numbers in _read_dense(files, dense, dtype):
            yield f"dense.{index}.{name}", numbers


def name_of(stored: str, config: EncoderConfig) -> str | None:
    """Return the common name of a stored tensor; None if the model doesn't need it."""
    name = _PREFIX.sub("", stored)
    renames = _TENSORFLOW
    if config.family == "bert" and config.task == "classify":
        renames += _BERT_CLASSIFIER
    elif name.startswith(_POOLER):
        return None
    if config.family == "distilbert":
        renames += _DISTILBERT
    elif config.family == "mpnet":
        renames += _MPNET
    if name.startswith(_LEFT_OUT):
        return None
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def encoder_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the encoder, by common name, without dense layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
    }
    if config.type_vocab_size:
        shapes["embeddings.token_type_embeddings.weight"] = (config.type_vocab_size, hidden)
    if config.relative_buckets:
        shapes[RELATIVE_BIAS] = (config.relative_buckets, config.num_heads)
    norms = ["embeddings.LayerNorm"]
    linears: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        prefix = f"encoder.layer.{layer}."
        for name in ("query", "key", "value"):
            linears[f"{prefix}attention.self.{name}"] = (hidden, hidden)
        linears[f"{prefix}attention.output.dense"] = (hidden, hidden)
        linears[f"{prefix}intermediate.dense"] = (inner, hidden)
        linears[f"{prefix}output.dense"] = (hidden, inner)
        norms += [f"{prefix}attention.output.LayerNorm", f"{prefix}output.LayerNorm"]
    if config.task == "classify":
        linears["classifier.dense"] = (hidden, hidden)
        linears["classifier.out_proj"] = (len(config.labels), hidden)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes


def _read_dense(
    files: EncoderFiles, dense: Dense, dtype: np.dtype[Any]
) -> Iterator[tuple[str, Numbers]]:
    shapes: dict[str, tuple[int, ...]] = {"weight": (dense.out_features, dense.in_features)}
    if dense.bias:
        shapes["bias"] = (dense.out_features,)
    return load_folder(
        files.path / dense.folder,
        shapes,
        lambda stored: stored.removeprefix("linear."),
        "Dense",
        dtype,
        lambda done, total: None,
    )
