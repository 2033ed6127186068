"""The tower of a model that reads images or audio: transformers' own, without the decoder."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.models.media.phi4 import let_patches_see_each_other, phi4_features
from gpu.models.media.qwen2_audio import qwen2_audio_features
from gpu.models.part_reading import read_part
from trioserve.model_files import ModelFiles
from trioserve.model_files.media_config import FLAT_CLASSES

Arrays = Mapping[str, npt.NDArray[Any]]


class MediaTower:
    """Tower and projector of a model, in evaluation mode.

    Args:
        model: The whole model without its decoder's layers.
        device: Device that computes it.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._features = _features_of(model.model)
        names = inspect.signature(self._features).parameters
        self._names = frozenset(names) - {"self", "kwargs"}

    @classmethod
    def load(cls, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> MediaTower:
        """Return the tower in the folder of ``files``.

        Raises:
            ModelLoadError: transformers can't load it.
        """
        assert files.media is not None
        architecture = files.media.architecture
        layers = "num_hidden_layers"
        if architecture not in FLAT_CLASSES:
            layers = f"text_config.{layers}"
        model = read_part(files, architecture, dtype, without=layers)
        _drop_decoder(model)
        return cls(model.to(device), device)

    @torch.inference_mode()
    def embed(self, arrays: Arrays) -> torch.Tensor:
        """Return the embeddings [n, E] of one medium, in the order of its placeholder tokens.

        Args:
            arrays: What the model's processor gives for it, by name, with a batch dimension of 1.
        """
        given = {name: self._tensor(array) for name, array in arrays.items() if name in self._names}
        found = self._features(**given)
        features = getattr(found, "pooler_output", found)
        if isinstance(features, (list, tuple)):
            features = torch.cat([each.flatten(0, -2) for each in features])
        embeddings: torch.Tensor = features.flatten(0, -2)
        return embeddings

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
        return tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor


def _features_of(model: Any) -> Callable[..., Any]:
    """Return the function of a model without its head that computes embeddings of a medium."""
    if hasattr(model, "embed_tokens_extend"):
        let_patches_see_each_other(model)
        return functools.partial(phi4_features, model)
    for name in ("get_image_features", "get_audio_features"):
        if hasattr(model, name):
            found: Callable[..., Any] = getattr(model, name)
            return found
    return functools.partial(qwen2_audio_features, model)


def _drop_decoder(model: Any) -> None:
    """Free what is left of the decoder: its embeddings and its head."""
    for name in ("language_model", "text_model", "embed_tokens"):
        if hasattr(model.model, name):
            setattr(model.model, name, None)
    model.lm_head = None
