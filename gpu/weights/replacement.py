"""Other weights for a model that is served already."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

from trioserve.errors import ModelLoadError
from trioserve.model_files import ModelConfig, ModelFiles, open_model

__all__ = ["weights_for"]

_FREE = frozenset({"dtype", "bos_token_id", "eos_token_ids", "has_head"})
"""What a configuration may say otherwise: it concerns neither the computation nor the KV cache."""


def weights_for(files: ModelFiles, path: Path) -> ModelFiles:
    """The files at ``path``, to be read as weights of the model of ``files``.

    Args:
        files: of the model that is served.
        path: a folder or a GGUF file of a model of the same shape, or a single safetensors file
            with all its tensors, which is taken at its word.

    Raises:
        ModelLoadError: there is nothing to be read, or it is another model's; the message names
            what differs.
    """
    if path.suffix == ".safetensors" and path.is_file():
        return attrs.evolve(files, path=path, format="safetensors", gguf_header=None)
    other = open_model(path)
    differences = _differences(files.config, other.config)
    if differences:
        raise ModelLoadError(
            f"{path} is no checkpoint of the model that is served: {', '.join(differences)}"
        )
    return other


def _differences(served: ModelConfig, other: ModelConfig) -> list[str]:
    fields = [field.name for field in attrs.fields(ModelConfig) if field.name not in _FREE]
    pairs = {name: (getattr(served, name), getattr(other, name)) for name in fields}
    return [
        f"{name} is {theirs!r} instead of {ours!r}"
        for name, (ours, theirs) in pairs.items()
        if not _same(ours, theirs)
    ]


def _same(ours: Any, theirs: Any) -> bool:
    # A GGUF file has numbers in float32 that a config.json has in decimal.
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
