"""A model's tensors, handed out by name to the model's builder."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trioserve.protocol.errors import ModelLoadError


class NamedTensors:
    """A model's tensors by name, each taken once, so that a layer's are freed as it is built."""

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = dict(weights)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the tensor ``name``.

        Raises:
            ModelLoadError: it is missing, or not of this shape.
        """
        tensor = self.take_optional(name, *shape)
        if tensor is None:
            raise ModelLoadError(f"the model's files lack the tensor {name}")
        return tensor

    def take_optional(self, name: str, *shape: int) -> torch.Tensor | None:
        """Take a tensor as :meth:`take` does; return None if it is missing."""
        tensor = self._tensors.pop(name, None)
        if tensor is not None and tensor.shape != shape:
            raise ModelLoadError(
                f"the tensor {name} has the shape {list(tensor.shape)}, "
                f"but the model's configuration wants {list(shape)}"
            )
        return tensor

    def check_empty(self) -> None:
        """Refuse tensors that weren't taken: the model computes something that its builder doesn't.

        Raises:
            ModelLoadError: a tensor is left.
        """
        if self._tensors:
            names = sorted(self._tensors)
            raise ModelLoadError(
                f"the model's files hold {len(names)} tensors that its configuration has no place "
                f"for, such as {names[0]}"
            )
