"""The registry of model classes by family."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gpu.models.decoder import Decoder
from gpu.models.operations import Operations
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Ranks
from trioserve.model_files.config import ModelConfig
from trioserve.protocol.errors import ModelLoadError

MODEL_CLASSES: dict[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "mixtral": Decoder,
    "phi3": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "qwen3_moe": Decoder,
    "smollm3": Decoder,
}
"""By ``ModelConfig.family``: the class of the model."""


def build_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    operations: Operations | None = None,
    part: ModelPart | None = None,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """Return the model of ``config`` with ``weights``; see :class:`~gpu.models.decoder.Decoder`.

    With ``part``, return that part, which computes together with those of the other ``ranks``. With
    a ``device``, each tensor, or its part, is moved there as it comes.

    Raises:
        ModelLoadError: the family is unknown, or the weights don't fit the configuration.
    """
    if config.family not in MODEL_CLASSES:
        known = ", ".join(sorted(MODEL_CLASSES))
        raise ModelLoadError(f"the model family {config.family!r} is not supported ({known} are)")
    if part is not None:
        config = part.config()
        pieces = ((part.name_of(name), part.piece(name, tensor)) for name, tensor in weights)
        weights = ((name, own) for name, own in pieces if name is not None and own is not None)
    if device is not None:
        weights = ((name, tensor.to(device)) for name, tensor in weights)
    return MODEL_CLASSES[config.family](config, weights, operations, part, ranks)
