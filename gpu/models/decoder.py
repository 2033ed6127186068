"""A llama-like decoder: Llama 2 and 3, SmolLM 2 and 3, Mistral, Mixtral, Qwen 2, 2.5, 3 and 3 MoE.

The families differ in what :class:`~trioserve.model_files.ModelConfig` says and in nothing else:
biases, a norm on queries and keys (Qwen 3), layers without rotary embedding (SmolLM 3), sliding
windows (Mistral, some of Qwen 2), tied embeddings, and layers of experts (Mixtral, Qwen 3 MoE).

Shapes: T tokens of all rows one after the other, E = hidden_size, H = num_heads,
K = num_kv_heads, D = head_dim, F = intermediate_size, V = vocab_size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F

from gpu.attention import Attention, QkNorm
from gpu.lora.updates import ProductUpdates
from gpu.models.linear import Linear
from gpu.models.mlp import Experts, Mlp
from gpu.models.operations import Operations
from gpu.models.operations.torch_ops import TorchOperations
from gpu.weights.named import NamedTensors
from trioserve.model_files.config import ExpertsConfig, ModelConfig
from trioserve.protocol.errors import ModelLoadError

__all__ = ["Decoder"]


@attrs.frozen(kw_only=True)
class _Layer:
    attention_norm: torch.Tensor  # [E]
    qkv: Linear  # E -> (H + 2 K) D
    qk_norm: QkNorm | None
    output: Linear  # H D -> E
    mlp_norm: torch.Tensor  # [E]
    mlp: Mlp | Experts
    window: int | None
    rotate: bool


class Decoder:
    """The weights of one model and its forward pass.

    ``weights`` are (name, tensor) pairs with the names that Hugging Face files use, of one dtype
    and on the device that is to compute; ``operations`` are that device's, torch's own if None.

    Raises:
        ModelLoadError: a tensor is missing, has the wrong shape, or has no place in the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        operations: Operations | None = None,
    ) -> None:
        self.config = config
        self._operations = operations or TorchOperations()
        tensors = NamedTensors(weights)
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = tensors.take("model.embed_tokens.weight", *shape)
        self._layers = [_layer(config, tensors, index) for index in range(config.num_layers)]
        self._norm = tensors.take("model.norm.weight", config.hidden_size)
        head = tensors.take_optional("lm_head.weight", *shape)
        if config.tie_word_embeddings:
            head = self._embedding
        if head is None:
            raise ModelLoadError("the model's files lack the tensor lm_head.weight")
        self._head = Linear(head)
        tensors.check_empty()

    @property
    def dtype(self) -> torch.dtype:
        """The number format of weights and activations."""
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embedding.device

    def overwrite(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Put ``weights``, all of this model, in place of its own, in the same memory.

        So whoever has noted where the weights lie, as CUDA graphs have, computes with the new ones.
        Weights that are packed, as bfloat16 is on a CPU, can't be overwritten.
        """
        for name, tensor in weights:
            stem, _, last = name.rpartition(".")
            match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
            if match is None:
                whole = {
                    "model.embed_tokens": self._embedding,
                    "model.norm": self._norm,
                    "lm_head": self._head.weight,
                }
                whole[stem].copy_(tensor)
            else:
                self._part_of(self._layers[int(match[1])], match[2], last).copy_(tensor)

    def _part_of(self, layer: _Layer, inner: str, last: str) -> torch.Tensor:
        """Where one tensor of a layer lies: in a product with others, it is some of its rows."""
        config = self.config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads = config.num_heads
        if inner in ("self_attn.q_norm", "self_attn.k_norm"):
            assert layer.qk_norm is not None
            norms = layer.qk_norm.weight
            return norms[:heads] if inner.endswith("q_norm") else norms[heads:]
        if inner in ("input_layernorm", "post_attention_layernorm"):
            return layer.attention_norm if inner == "input_layernorm" else layer.mlp_norm
        if inner.startswith("mlp."):
            linear, rows = layer.mlp.part(inner.removeprefix("mlp."))
        else:
            linear, rows = {
                "self_attn.q_proj": (layer.qkv, slice(0, q_size)),
                "self_attn.k_proj": (layer.qkv, slice(q_size, q_size + kv_size)),
                "self_attn.v_proj": (layer.qkv, slice(q_size + kv_size, None)),
                "self_attn.o_proj": (layer.output, slice(None)),
            }[inner]
        whole = linear.weight if last == "weight" else linear.bias
        assert whole is not None
        return whole[rows]

    def forward(
        self, tokens: torch.Tensor, attention: Attention, adapted: Sequence[ProductUpdates] = ()
    ) -> torch.Tensor:
        """The normed hidden states [T, E] of ``tokens`` [T] int64, which the head takes.

        ``attention`` knows the rows: its ``begin`` was called with the step's layout. ``adapted``
        are those that compute adapters, none if no token has one.
        """

        def project(index: int, name: str, linear: Linear, x: torch.Tensor) -> torch.Tensor:
            y = linear(x)
            for updates in adapted:
                updates.update(index, name, x, y)
            return y

        config, operations = self.config, self._operations
        eps = config.rms_norm_eps
        heads = (config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        residual = F.embedding(tokens, self._embedding)
        # A norm comes with the addition before it, so each layer ends with the norm of the next.
        norms = [layer.attention_norm for layer in self._layers] + [self._norm]
        h = operations.rms_norm(residual, norms[0], eps)
        for index, layer in enumerate(self._layers):
            qkv = project(index, "qkv", layer.qkv, h).view(-1, *heads)
            q = attention.rope_and_write(index, qkv, layer.rotate, layer.qk_norm)
            attended = attention.attend(index, q, layer.window).flatten(1)
            output = project(index, "output", layer.output, attended)
            h = operations.add_rms_norm(output, residual, layer.mlp_norm, eps)
            if isinstance(layer.mlp, Experts):
                down = layer.mlp.forward(h, operations)
            else:
                gated = operations.silu_mul(project(index, "gate_up", layer.mlp.gate_up, h))
                down = project(index, "down", layer.mlp.down, gated)
            h = operations.add_rms_norm(down, residual, norms[index + 1], eps)
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits [R, V] float32 that follow from rows [R, E] of :meth:`forward`'s result.

        They are written to ``out``, if given.
        """
        return self._head.in_float32(hidden, out)


def _layer(config: ModelConfig, tensors: NamedTensors, index: int) -> _Layer:
    prefix = f"model.layers.{index}."
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}

    def linear(block: str, parts: Mapping[str, int], in_size: int, *, bias: bool) -> Linear:
        return _take_linear(tensors, f"{prefix}{block}.", parts, in_size, bias=bias)

    def mlp(block: str, inner: int, *, bias: bool) -> Mlp:
        return Mlp(
            gate_up=linear(block, {"gate_proj": inner, "up_proj": inner}, hidden, bias=bias),
            down=linear(block, {"down_proj": hidden}, inner, bias=bias),
        )

    def mixture(experts: ExpertsConfig) -> Experts:
        size = experts.intermediate_size
        return Experts(
            config=experts,
            router=linear("mlp", {"gate": experts.count}, hidden, bias=False),
            experts=[mlp(f"mlp.experts.{i}", size, bias=False) for i in range(experts.count)],
        )

    experts = config.experts_of(index)
    qk_norm = None
    if config.qk_norm:
        norms = (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
        weights = [
            tensors.take(f"{prefix}self_attn.{name}.weight", config.head_dim).expand(heads, -1)
            for name, heads in norms
        ]
        qk_norm = QkNorm(torch.cat(weights), config.rms_norm_eps)
    return _Layer(
        attention_norm=tensors.take(prefix + "input_layernorm.weight", hidden),
        qkv=linear("self_attn", qkv, hidden, bias=config.qkv_bias),
        qk_norm=qk_norm,
        output=linear("self_attn", {"o_proj": hidden}, q_size, bias=config.output_bias),
        mlp_norm=tensors.take(prefix + "post_attention_layernorm.weight", hidden),
        mlp=(
            mlp("mlp", config.intermediate_size, bias=config.mlp_bias)
            if experts is None
            else mixture(experts)
        ),
        window=config.windows[index],
        rotate=config.rope_layers[index],
    )


def _take_linear(
    tensors: NamedTensors, stem: str, parts: Mapping[str, int], in_size: int, *, bias: bool
) -> Linear:
    """The parts, each with its number of outputs, as one product."""
    names = [(stem + part, size) for part, size in parts.items()]
    weight = torch.cat([tensors.take(f"{name}.weight", out, in_size) for name, out in names])
    if not bias:
        return Linear(weight)
    return Linear(weight, torch.cat([tensors.take(f"{name}.bias", out) for name, out in names]))
