"""BERT and similar encoders: bidirectional attention, with a norm after each addition.

BERT is Devlin et al. 2019 (arXiv:1810.04805). RoBERTa, Liu et al. 2019 (arXiv:1907.11692), and
XLM-R, Conneau et al. 2020 (arXiv:1911.02116), differ in positions and head. DistilBERT, Sanh et al.
2019 (arXiv:1910.01108), has no token types. MPNet, Song et al. 2020 (arXiv:2004.09297), adds a bias
by distance to the scores. :class:`~trioserve.model_files.EncoderConfig` has all differences.

Shapes: T tokens of N sequences, concatenated, E = hidden_size, H = num_heads, D = head_dim,
F = intermediate_size, L labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gpu.models.encoder.activations import ACTIVATIONS
from gpu.models.encoder.packing import Ints, LengthGroup, Packed, check_inputs, pack, split
from gpu.models.encoder.pooling import pool
from gpu.models.encoder.relative import RelativeBias
from gpu.models.linear import Linear, padded_rows, prepacks
from gpu.weights.encoder import RELATIVE_BIAS
from gpu.weights.named import NamedTensors
from trioserve.model_files import EncoderConfig
from trioserve.model_files.encoder_config import Activation

CPU_BATCH_TOKENS = 512
"""Tokens for each thread in a batch on a CPU. Their activations fit into the cache, and the
allocator keeps blocks of that size for the next batch."""


@attrs.frozen
class _Norm:
    weight: torch.Tensor  # [E]
    bias: torch.Tensor  # [E]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@attrs.frozen(kw_only=True)
class _Layer:
    qkv: Linear  # E -> 3 H D
    output: Linear  # H D -> E
    attention_norm: _Norm
    up: Linear  # E -> F
    down: Linear  # F -> E
    mlp_norm: _Norm


@attrs.frozen
class _HeadLayer:
    """A linear layer behind the pooling, with float32 weights."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


class Encoder:
    """The weights of one encoder and its forward pass.

    ``weights`` are (name, tensor) pairs with the names of :mod:`gpu.weights.encoder`, of one dtype
    and on the model's device.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape.
    """

    def __init__(self, config: EncoderConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.config = config
        tensors = NamedTensors(weights)
        size = config.hidden_size
        tables = "embeddings.{}_embeddings.weight"
        self._words = tensors.take(tables.format("word"), config.vocab_size, size)
        self._positions = tensors.take(
            tables.format("position"), config.max_position_embeddings, size
        )
        self._types = None
        if config.type_vocab_size:
            self._types = tensors.take(tables.format("token_type"), config.type_vocab_size, size)
        self._norm = _norm(config, tensors, "embeddings.LayerNorm")
        self._relative = None
        if config.relative_buckets:
            table = tensors.take(RELATIVE_BIAS, config.relative_buckets, config.num_heads)
            self._relative = RelativeBias(table, config.max_length)
        self._layers = [_layer(config, tensors, index) for index in range(config.num_layers)]
        self._head = _head(config, tensors)
        tensors.check_empty()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self._words.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._words.device

    @torch.inference_mode()
    def run(self, ids: Sequence[Ints], type_ids: Sequence[Ints]) -> npt.NDArray[np.float32]:
        """Return the result for each sequence: [N, config.num_outputs] float32.

        It is an embedding, normalized if the configuration says so, or the logits of the labels.
        The other sequences affect it by rounding only.

        Args:
            ids: the token ids of each sequence, [length], with special tokens.
            type_ids: the token types of each sequence, [length].

        Raises:
            ValueError: a sequence is empty, too long for the model, or has unknown ids.
        """
        check_inputs(self.config, ids, type_ids)
        lengths = [len(sequence) for sequence in ids]
        out = np.empty((len(ids), self.config.num_outputs), dtype=np.float32)
        max_tokens = sum(lengths)
        if self.device.type == "cpu":
            max_tokens = CPU_BATCH_TOKENS * torch.get_num_threads()
        for batch in split(lengths, max_tokens):
            packed = pack(
                self.config.padding_idx, [ids[i] for i in batch], [type_ids[i] for i in batch]
            )
            out[batch] = self._outputs(self.forward(packed), packed).cpu().numpy()
        return out

    def forward(self, packed: Packed) -> torch.Tensor:
        """Return the hidden states of the last layer, [T, E] in the model's dtype."""
        hidden = F.embedding(self._to_device(packed.ids), self._words)
        hidden = hidden + F.embedding(self._to_device(packed.positions), self._positions)
        if self._types is not None:
            hidden += F.embedding(self._to_device(packed.type_ids), self._types)
        hidden = self._norm(self._pad(hidden))
        activation = ACTIVATIONS[self.config.activation]
        biases = self._biases(packed.groups)
        for layer in self._layers:
            qkv = layer.qkv(hidden).view(-1, 3, self.config.num_heads, self.config.head_dim)
            hidden = layer.attention_norm(
                layer.output(_attend(qkv, packed.groups, biases)) + hidden
            )
            hidden = layer.mlp_norm(layer.down(activation(layer.up(hidden))) + hidden)
        return hidden[: len(packed.ids)]

    def _biases(self, groups: Sequence[LengthGroup]) -> list[torch.Tensor | None]:
        """Return the score bias of each group, shared by all layers: [1, H, length, length]."""
        relative = self._relative
        return [None if relative is None else relative.of_length(g.length) for g in groups]

    def _pad(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pad to a number of rows for packed products, so that they needn't pad one by one."""
        if not prepacks(self.dtype, self.device, float32=True):
            return hidden
        return F.pad(hidden, (0, 0, 0, padded_rows(len(hidden)) - len(hidden)))

    def _outputs(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return the result [N, num_outputs] float32 of hidden states [T, E]."""
        pooled = pool(hidden, self._to_device(packed.ends), self.config.pooling or "cls")
        for layer in self._head:
            pooled = layer(pooled)
        return F.normalize(pooled, dim=-1) if self.config.normalize else pooled

    def _to_device(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)


def _attend(
    qkv: torch.Tensor, groups: Sequence[LengthGroup], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Attend from each token to all tokens of its sequence: [T, 3, H, D] to [T, H D].

    ``biases`` are added to the scores of each group: [1, H, length, length], or None. Rows after
    the last group are padding and become zeros.

    Sequences of one length are computed together, without padding. On a CPU that is faster even if
    all lengths differ: padding 32 sequences of 5 to 256 tokens to the longest takes three times as
    long, and of 5 to 32 tokens a tenth longer.
    """
    _, _, num_heads, head_dim = qkv.shape
    out = qkv.new_empty(len(qkv), num_heads, head_dim)
    start = 0
    for group, bias in zip(groups, biases, strict=True):
        end = start + group.count * group.length
        shape = (group.count, group.length, -1, num_heads, head_dim)
        q, k, v = qkv[start:end].view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        out[start:end].view(shape).copy_(attended.transpose(1, 2).unsqueeze(2))
        start = end
    out[start:] = 0
    return out.flatten(1)


def _norm(config: EncoderConfig, tensors: NamedTensors, name: str) -> _Norm:
    weight, bias = (
        tensors.take(f"{name}.{part}", config.hidden_size) for part in ("weight", "bias")
    )
    return _Norm(weight, bias, config.layer_norm_eps)


def _layer(config: EncoderConfig, tensors: NamedTensors, index: int) -> _Layer:
    prefix = f"encoder.layer.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size

    def linear(names: Sequence[str], out_size: int, in_size: int) -> Linear:
        weights = [tensors.take(f"{prefix}{name}.weight", out_size, in_size) for name in names]
        biases = [tensors.take(f"{prefix}{name}.bias", out_size) for name in names]
        return Linear(torch.cat(weights), torch.cat(biases), pack_float32=True)

    qkv = [f"attention.self.{name}" for name in ("query", "key", "value")]
    return _Layer(
        qkv=linear(qkv, hidden, hidden),
        output=linear(["attention.output.dense"], hidden, hidden),
        attention_norm=_norm(config, tensors, prefix + "attention.output.LayerNorm"),
        up=linear(["intermediate.dense"], inner, hidden),
        down=linear(["output.dense"], hidden, inner),
        mlp_norm=_norm(config, tensors, prefix + "output.LayerNorm"),
    )


def _head(config: EncoderConfig, tensors: NamedTensors) -> list[_HeadLayer]:
    """Return the linear layers behind the pooling, in float32 for any dtype of the model."""

    def layer(name: str, out: int, size: int, bias: bool, activation: Activation) -> _HeadLayer:
        weight = tensors.take(f"{name}.weight", out, size).float()
        biases = tensors.take(f"{name}.bias", out).float() if bias else None
        return _HeadLayer(weight, biases, activation)

    if config.task == "classify":
        size = config.hidden_size
        return [
            layer("classifier.dense", size, size, True, config.head_activation),
            layer("classifier.out_proj", len(config.labels), size, True, "identity"),
        ]
    return [
        layer(f"dense.{i}", each.out_features, each.in_features, each.bias, each.activation)
        for i, each in enumerate(config.dense)
    ]
