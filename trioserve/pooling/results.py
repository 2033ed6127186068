"""What comes of texts: vectors, scores, labels."""

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
    """Of each text."""


@attrs.frozen(eq=False)
class Scores:
    """How well each of N pairs of texts goes together."""

    values: Floats
    """[N] float32."""
    usage: Usage


@attrs.frozen(eq=False)
class LabelScores:
    """How probable each of L tokens is after each of N items."""

    values: Floats
    """[N, L] float32: their probabilities, in the order in which they were asked for."""
    usage: Usage


@attrs.frozen(eq=False)
class Classifications:
    """What each of N texts is, by L labels."""

    labels: tuple[str, ...]
    logits: Floats
    """[N, L] float32, as the model gives them."""
    probabilities: Floats
    """[N, L] float32: of each label by itself where the model says so, else 1 in all."""
    usage: Usage

    @property
    def best(self) -> tuple[str, ...]:
        """The most probable label of each text."""
        return tuple(self.labels[index] for index in self.probabilities.argmax(axis=1).tolist())


@attrs.frozen
class Shape:
    """What embeddings are to be like.

    Args:
        dimensions: how many to keep of each; None for all.
        normalize: whether they are to be as long as 1; None for what is usual: those that the model
            gives so, and those that are cut.
        are_normalized: whether the model gives them so.
    """

    dimensions: int | None
    normalize: bool | None
    are_normalized: bool

    def check(self, size: int) -> None:
        """Whether vectors of ``size`` dimensions can be made so.

        Raises:
            InvalidRequest: there are fewer dimensions, or the model can't but normalize.
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
        """``vectors`` [N, size], as the model gives them, as they are wanted."""
        cut = vectors if self.dimensions is None else vectors[:, : self.dimensions]
        is_cut = self.dimensions is not None
        normalize = is_cut if self.normalize is None else self.normalize
        return _normalized(cut) if normalize else np.ascontiguousarray(cut)


def _normalized(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    # As torch does it: a vector of nothing stays one.
    scaled: Floats = (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
    return scaled


def similarities(first: Floats, second: Floats) -> Floats:
    """[N]: the cosine between the vectors [N, dim] of two lists."""
    values: Floats = (_normalized(first) * _normalized(second)).sum(axis=1, dtype=np.float32)
    return values


def probabilities_of(logits: Floats, *, independent: bool) -> Floats:
    """[N, L]: of labels with ``logits`` [N, L], of which a text has one, or any where they are
    ``independent``. A single label is always by itself."""
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
    """``activation`` of each number, of the same shape, float32."""
    values: Floats = np.asarray(_FUNCTIONS[activation](x), dtype=np.float32).reshape(x.shape)
    return values
