"""Opens other weights for a model that is being served, and checks that they fit it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs

from trioserve.model_files import (
    EncoderFiles,
    ModelConfig,
    ModelFiles,
    TransformersConfig,
    open_encoder,
    open_model,
)
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start

_FREE = frozenset({"dtype", "bos_token_id", "eos_token_ids", "has_head"})
"""Fields of a configuration that may differ: neither the model nor its KV cache depends on them."""


def open_files(start: Start) -> ModelFiles:
    """Open the files of the model that is to be served, with other weights if it names some.

    Raises:
        ModelLoadError: as :func:`~trioserve.model_files.open_model` and :func:`weights_for`.
    """
    files = open_model(Path(start.model), start.model_impl)
    return weights_for(files, Path(start.weights)) if start.weights else files


def weights_for(files: ModelFiles, path: Path) -> ModelFiles:
    """Open the files at ``path`` as weights for the model of ``files``.

    Args:
        files: the files of the served model.
        path: a folder or a GGUF file of a model of the same shape, or a single safetensors file
            with all tensors, which has no configuration to compare.

    Raises:
        ModelLoadError: they can't be opened, or are of another model; the message names what
            differs.
    """
    if files.media is not None or files.speech is not None:
        kind = "reads images" if files.speech is None else "transcribes speech"
        raise ModelLoadError(
            f"the weights of a model that {kind} can't be exchanged: restart the server"
        )
    if path.suffix == ".safetensors" and path.is_file():
        if isinstance(files.config, TransformersConfig):
            raise ModelLoadError(
                f"{path} is a single file, and transformers reads whole folders: give one of those"
            )
        return attrs.evolve(
            files, path=path, format="safetensors", gguf_header=None, only_finite=True
        )
    served = files.config
    computed = "native" if isinstance(served, ModelConfig) else "transformers"
    other = open_model(path, computed)
    _refuse_others(path, _shape(served), _shape(other.config))
    return attrs.evolve(other, only_finite=True)


def encoder_weights_for(files: EncoderFiles, path: Path) -> EncoderFiles:
    """Open the folder ``path`` as weights for the encoder of ``files``.

    Raises:
        ModelLoadError: it can't be opened, or is of another model; the message names what differs.
    """
    other = open_encoder(path)
    _refuse_others(path, attrs.asdict(files.config), attrs.asdict(other.config))
    return other


def _refuse_others(path: Path, served: dict[str, Any], found: dict[str, Any]) -> None:
    differences = _differences(served, found)
    if differences:
        raise ModelLoadError(
            f"{path} is no checkpoint of the model that is served: {', '.join(differences)}"
        )


def _shape(config: ModelConfig | TransformersConfig) -> dict[str, Any]:
    """Return the fields that the model and its KV cache depend on."""
    if isinstance(config, TransformersConfig):
        return dict(config.shape)
    fields = (field.name for field in attrs.fields(ModelConfig))
    return {name: getattr(config, name) for name in fields if name not in _FREE}


def _differences(served: dict[str, Any], other: dict[str, Any]) -> list[str]:
    names = dict.fromkeys((*served, *other))
    pairs = {name: (served.get(name), other.get(name)) for name in names}
    return [
        f"{name} is {theirs!r} instead of {ours!r}"
        for name, (ours, theirs) in pairs.items()
        if not _same(ours, theirs)
    ]


def _same(ours: Any, theirs: Any) -> bool:
    # GGUF stores as float32 what a config.json has in decimal.
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
