"""The shape of an encoder: BERT and its relatives, which read a whole text in both directions."""

from __future__ import annotations

from typing import Literal

import attrs

EncoderTask = Literal["embed", "classify"]
"""What a model is for: a vector for a text, or a score for each label."""

Pooling = Literal["cls", "mean", "last", "max"]
"""How the vectors of a text's tokens become one: the first, their mean, the last, or the largest
number in each dimension."""

Activation = Literal["identity", "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]
"""A function of each number; ``gelu_tanh`` is the approximation of ``gelu`` by a tanh."""


@attrs.frozen(kw_only=True)
class Dense:
    """A linear layer behind the pooling, as sentence-transformers has them."""

    folder: str
    """In the model's own, where its weights are."""
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """An encoder: embeddings, then attention, norm, MLP, norm, repeated, then a head.

    A model that embeds has a pooling and no ``labels``. For one that classifies it is the other way
    round: its head takes the first token.
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
    """The id whose tokens aren't counted in positions (RoBERTa); None counts all, from 0 on."""
    relative_buckets: int = 0
    """Kinds of distances between two tokens, for each of which every head of the attention has a
    number that it adds (MPNet); 0 for none."""
    type_vocab_size: int
    """How many kinds of tokens there are, such as those of a pair's first and second text."""
    marks_pairs: bool
    """Whether the tokens of a pair's second text are of another kind than those of the first."""
    layer_norm_eps: float
    activation: Activation
    max_length: int
    """The most tokens of a text or pair, those that the tokenizer adds included."""
    pooling: Pooling | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    """Whether embeddings are made as long as 1."""
    labels: tuple[str, ...] = ()
    """The names of the labels, in the order of the logits."""
    independent_labels: bool = False
    """Whether a text may have any number of the labels, each with a probability of its own."""
    head_activation: Activation = "tanh"
    """Between the two layers that make logits of the first token."""
    score_activation: Activation = "identity"
    """What makes scores of logits where the model ranks pairs; logits are given without it."""
    lower_case: bool = False
    """Whether texts are lower-cased before anything else is done to them."""

    @property
    def head_dim(self) -> int:
        """Numbers in a head of the attention."""
        return self.hidden_size // self.num_heads

    @property
    def first_position(self) -> int:
        """The position of a text's first token."""
        return 0 if self.padding_idx is None else self.padding_idx + 1

    @property
    def num_outputs(self) -> int:
        """Numbers that come out for a text: dimensions of its embedding, or labels."""
        if self.task == "classify":
            return len(self.labels)
        return self.dense[-1].out_features if self.dense else self.hidden_size
