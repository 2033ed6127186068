"""The shape of an encoder, a model like BERT whose tokens attend to the whole text."""

from __future__ import annotations

from typing import Literal

import attrs

EncoderTask = Literal["embed", "classify"]
"""Task of an encoder: a vector for each text, or a score for each label."""

Pooling = Literal["cls", "mean", "last", "max"]
"""Pooling of a text's hidden states: the first token's, their mean, the last token's, or the
maximum of each dimension.
"""

Activation = Literal["identity", "gelu", "gelu_tanh", "relu", "sigmoid", "silu", "tanh"]
"""Activation function; ``gelu_tanh`` is the approximation of ``gelu`` by a tanh."""


@attrs.frozen(kw_only=True)
class Dense:
    """A linear layer after the pooling, as in sentence-transformers."""

    folder: str
    """Folder of its weights, relative to the model's."""
    in_features: int
    out_features: int
    bias: bool
    activation: Activation


@attrs.frozen(kw_only=True)
class EncoderConfig:
    """An encoder: embeddings, then layers of attention, norm, MLP and norm, then a head.

    An embedding model has a pooling and no ``labels``. A classifier has labels and no pooling: its
    head takes the first token.
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
    """Rows of the position embeddings; the first ``first_position`` rows are unused."""
    padding_idx: int | None
    """Id of tokens that aren't counted in positions (RoBERTa); None counts all, from 0 on."""
    relative_buckets: int = 0
    """Number of buckets of token distances, each with a bias per head (MPNet); 0 for none."""
    type_vocab_size: int
    """Number of token types, such as first and second text of a pair."""
    marks_pairs: bool
    """True if the tokens of a pair's second text have their own type."""
    layer_norm_eps: float
    activation: Activation
    max_length: int
    """Most tokens of a text or pair, special tokens included."""
    pooling: Pooling | None = None
    dense: tuple[Dense, ...] = ()
    normalize: bool = False
    """True to scale embeddings to length 1."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the logits."""
    independent_labels: bool = False
    """True if a text may have several labels, each with its own probability."""
    head_activation: Activation = "tanh"
    """Activation between the two layers of the head."""
    score_activation: Activation = "identity"
    """Activation that turns a ranking model's logits into scores; None returns logits."""
    lower_case: bool = False
    """True to lower-case texts first."""

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def first_position(self) -> int:
        """Position of a text's first token."""
        return 0 if self.padding_idx is None else self.padding_idx + 1

    @property
    def num_outputs(self) -> int:
        """Size of a text's result: dimensions of the embedding, or number of labels."""
        if self.task == "classify":
            return len(self.labels)
        return self.dense[-1].out_features if self.dense else self.hidden_size
