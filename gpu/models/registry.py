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
) -> Decoder:
    """Return the model of ``config`` with ``weights``; see :class:`~gpu.models.decoder.Decoder`.

    With ``part``, return that part, which computes together with those of the other ``ranks``.

    Raises:
        ModelLoadError: the family is unknown, or the weights don't fit the configuration.
    """
    if config.family not in MODEL_CLASSES:
        known = ", ".join(sorted(MODEL_CLASSES))
        raise ModelLoadError(f"the model family {config.family!r} is not supported ({known} are)")
    if part is None:
        return MODEL_CLASSES[config.family](config, weights, operations)
    pieces = ((part.name_of(name), part.piece(name, tensor)) for name, tensor in weights)
    own = ((name, piece) for name, piece in pieces if name is not None and piece is not None)
    return MODEL_CLASSES[config.family](part.config(), own, operations, part, ranks)
