"""The shape of an encoder: BERT and its relatives, which read a whole text in both directions."""

from __future__ import annotations

from typing import Literal

import attrs

EncoderTask = Literal["embed", "classify"]
"""Task of a model: a vector for a text, or a score for each label."""

Pooling = Literal["cls", "mean", "last", "max"]
"""Pooling of the vectors of a text's tokens: the first, their mean, the last, or the maximum of
each dimension.
"""

Activation = Literal["identity", "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]
"""Activation function; ``gelu_tanh`` is the approximation of ``gelu`` by a tanh."""


@attrs.frozen(kw_only=True)
class Dense:
    """A linear layer behind the pooling, as sentence-transformers has them."""

    folder: str
    """Folder of its weights, inside the model's folder."""
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """An encoder: embeddings, then attention, norm, MLP, norm, repeated, then a head.

    A model that embeds has a pooling and no ``labels``. A model that classifies has labels and no
    pooling: its head takes the first token.
    """

    family: str
    """``bert``, ``distilbert``, ``mpnet``, ``roberta`` or ``xlm-roberta``."""
    task: EncoderTask
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    """Rows of the table of positions; the first ``first_position`` belong to no token."""
    padding_idx: int | None
    """Id of tokens that aren't counted in positions (RoBERTa); None counts all, from 0 on."""
    relative_buckets: int = 0
    """Number of buckets for the distance between two tokens; every head adds a bias for each bucket
    (MPNet). 0 for none.
    """
    type_vocab_size: int
    """Number of types of tokens, such as those of a pair's first and second text."""
    marks_pairs: bool
    """True if the tokens of a pair's second text have a type of their own."""
    layer_norm_eps: float
    activation: Activation
    max_length: int
    """The most tokens of a text or pair, special tokens included."""
    pooling: Pooling | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    """True to scale embeddings to length 1."""
    labels: tuple[str, ...] = ()
    """The names of the labels, in the order of the logits."""
    independent_labels: bool = False
    """True if a text may have several labels, each with a probability of its own."""
    head_activation: Activation = "tanh"
    """Activation between the two layers of the head."""
    score_activation: Activation = "identity"
    """Activation that turns a ranking model's logits into scores; None returns logits."""
    lower_case: bool = False
    """True to lower-case texts first."""

    @property
    def head_dim(self) -> int:
        """Size of a head of the attention."""
        return self.hidden_size // self.num_heads

    @property
    def first_position(self) -> int:
        """The position of a text's first token."""
        return 0 if self.padding_idx is None else self.padding_idx + 1

    @property
    def num_outputs(self) -> int:
        """Size of the result for a text: dimensions of its embedding, or labels."""
        if self.task == "classify":
            return len(self.labels)
        return self.dense[-1].out_features if self.dense else self.hidden_size
