"""A model's tensors by name, for the code that builds the model."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trioserve.protocol.errors import ModelLoadError


class NamedTensors:
    """A model's tensors by name. Each is taken once, so that it is freed once it is packed."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = dict(weights)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Remove and return the tensor ``name``.

        Raises:
            ModelLoadError: it is missing or has another shape.
        """
        tensor = self.take_optional(name, *shape)
        if tensor is None:
            raise ModelLoadError(f"the model's files lack the tensor {name}")
        return tensor

    def take_optional(self, name: str, *shape: int) -> torch.Tensor | None:
        """Remove and return a tensor like :meth:`take`, or return None if it is missing."""
        tensor = self._tensors.pop(name, None)
        if tensor is not None and tensor.shape != shape:
            raise ModelLoadError(
                f"the tensor {name} has the shape {list(tensor.shape)}, "
                f"but the model's configuration wants {list(shape)}"
            )
        return tensor

    def check_empty(self) -> None:
        """Refuse tensors that weren't taken, since the model's results may depend on them.

        Raises:
            ModelLoadError: a tensor is left.
        """
        if self._tensors:
            names = sorted(self._tensors)
            raise ModelLoadError(
                f"the model's files hold {len(names)} tensors that its configuration has no place "
                f"for, such as {names[0]}"
            )
