"""Results of pooling: vectors, scores and labels."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.model_files.encoder_config import Activation
from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.generation import Usage

Floats = npt.NDArray[np.float32]


@attrs.frozen(eq=False)
class Embeddings:
    """The vectors of N texts."""

    vectors: Floats
    """[N, dim] float32."""
    usage: Usage
    num_tokens: tuple[int, ...]
    """Number of tokens in each text."""


@attrs.frozen(eq=False)
class Scores:
    """The scores of N pairs of texts."""

    values: Floats
    """[N] float32."""
    usage: Usage


@attrs.frozen(eq=False)
class LabelScores:
    """The probabilities of L tokens after each of N items."""

    values: Floats
    """[N, L] float32: probabilities, in the order of the request."""
    usage: Usage


@attrs.frozen(eq=False)
class Classifications:
    """The probabilities of L labels for each of N texts."""

    labels: tuple[str, ...]
    logits: Floats
    """[N, L] float32, as the model gives them."""
    probabilities: Floats
    """[N, L] float32. Labels are independent if the model says so; otherwise a row sums to 1."""
    usage: Usage

    @property
    def best(self) -> tuple[str, ...]:
        """The most probable label of each text."""
        return tuple(self.labels[index] for index in self.probabilities.argmax(axis=1).tolist())


@attrs.frozen
class Shape:
    """The wanted form of embeddings.

    Args:
        dimensions: Number of dimensions to keep; None for all.
        normalize: Scale vectors to length 1. None normalizes vectors that are cut, and keeps all
            others as the model gives them.
        are_normalized: True if the model gives normalized vectors.
    """

    dimensions: int | None
    normalize: bool | None
    are_normalized: bool

    def check(self, size: int) -> None:
        """Check that vectors of ``size`` dimensions can have this form.

        Raises:
            InvalidRequest: There are fewer dimensions, or the model always normalizes.
        """
        if self.dimensions is not None and not 1 <= self.dimensions <= size:
            raise InvalidRequest(
                f"dimensions must be from 1 to {size}, as many as the model has; "
                f"got {self.dimensions}",
                param="dimensions",
            )
        if self.normalize is False and self.are_normalized and self.dimensions is None:
            raise InvalidRequest(
                "normalize can't be false: this model's vectors are always as long as 1",
                param="normalize",
            )

    def of(self, vectors: Floats) -> Floats:
        """Return ``vectors`` [N, size], as the model gives them, in this form."""
        cut = vectors if self.dimensions is None else vectors[:, : self.dimensions]
        is_cut = self.dimensions is not None
        normalize = is_cut if self.normalize is None else self.normalize
        return _normalized(cut) if normalize else np.ascontiguousarray(cut)


def _normalized(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # As in torch, a zero vector stays zero.
    scaled: Floats = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return scaled


def similarities(first: Floats, second: Floats) -> Floats:
    """Return the cosines [N] between the vectors [N, dim] of two lists."""
    values: Floats = (_normalized(first) * _normalized(second)).sum(axis=1, dtype=np.float32)
    return values


def probabilities_of(logits: Floats, *, independent: bool) -> Floats:
    """Return the probabilities [N, L] of labels with ``logits`` [N, L].

    A text has exactly one label, or any of them if they are ``independent``. A single label is
    always independent.
    """
    if independent or logits.shape[1] == 1:
        return activated(logits, "sigmoid")
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def _sigmoid(x: Floats) -> Floats:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), 1 - 1 / (1 + np.exp(-np.abs(x))))


def _gelu(x: Floats) -> Floats:
    return np.array([each * 0.5 * (1 + math.erf(each / math.sqrt(2))) for each in x.flat])


_FUNCTIONS: dict[Activation, Callable[[Floats], Floats]] = {
    "identity": lambda x: x,
    "gelu": _gelu,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "tanh": np.tanh,
}


def activated(x: Floats, activation: Activation) -> Floats:
    """Return ``activation`` of each number, float32, of the same shape."""
    values: Floats = np.asarray(_FUNCTIONS[activation](x), dtype=np.float32).reshape(x.shape)
    return values
