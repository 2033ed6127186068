"""A llama-like decoder: Llama 2 and 3, SmolLM 2 and 3, Mistral, Mixtral, Phi 3, Qwen 2, 2.5, 3
and 3 MoE.

:class:`~trioserve.model_files.ModelConfig` has all differences between the families: biases, a norm
on queries and keys (Qwen 3), layers without rotary embedding (SmolLM 3), sliding windows (Mistral,
some of Qwen 2), tied embeddings, and layers of experts (Mixtral, Qwen 3 MoE).

Shapes: T tokens of all rows, concatenated, E = hidden_size, H = num_heads,
K = num_kv_heads, D = head_dim, F = intermediate_size, V = vocab_size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
import torch.nn.functional as F

from gpu._util.upload import upload
from gpu.attention import Attention, QkNorm
from gpu.lora.updates import ProductUpdates
from gpu.models.linear import Linear
from gpu.models.mlp import Experts, Mlp
from gpu.models.operations import Operations
from gpu.models.operations.torch_ops import TorchOperations
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.ranks import Alone, Ranks
from gpu.models.step_embeddings import StepEmbeddings
from gpu.weights.named import NamedTensors
from gpu.weights.packed_modules import PackedShape, expert_shapes, packed_shapes
from trioserve.model_files.config import ExpertsConfig, ModelConfig
from trioserve.protocol.errors import ModelLoadError


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

    ``weights`` are (name, tensor) pairs with Hugging Face's names, of one dtype and on the model's
    device. ``operations`` are that device's; None means plain torch. With a ``part``, ``config``
    and ``weights`` are those of this part of a model, and the other ``ranks`` have the other parts.

    Raises:
        ModelLoadError: a tensor is missing, unknown or of the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        operations: Operations | None = None,
        part: ModelPart | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self._part = part
        self._ranks = ranks or Alone()
        self._operations = operations or TorchOperations()
        tensors = NamedTensors(weights)
        shape = (config.vocab_size, config.hidden_size)
        is_first, is_last = part is None or part.is_first, part is None or part.is_last
        self._embedding: torch.Tensor | None = None
        if is_first or (is_last and config.tie_word_embeddings):
            self._embedding = tensors.take("model.embed_tokens.weight", *shape)
        builder = _LayerBuilder(config, tensors, part)
        self._layers = [builder.layer(index) for index in range(config.num_layers)]
        self._packed_rows = builder.packed_rows
        self._norm: torch.Tensor | None = None
        self._head: Linear | None = None
        if is_last:
            self._norm = tensors.take("model.norm.weight", config.hidden_size)
            head = tensors.take_optional("lm_head.weight", *shape)
            if config.tie_word_embeddings:
                head = self._embedding
            if head is None:
                raise ModelLoadError("the model's files lack the tensor lm_head.weight")
            self._head = Linear(head)
        tensors.check_empty()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary of the whole model."""
        return (self.config if self._part is None else self._part.whole).vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        return self._layers[0].attention_norm.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._layers[0].attention_norm.device

    def overwrite(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by ``weights``, in the same memory.

        CUDA graphs hold the addresses of the weights, so they then compute with the new ones.
        Packed weights, such as bfloat16 on a CPU, can't be overwritten.
        """
        for name, tensor in weights:
            self._memory_of(name).copy_(tensor)

    def _memory_of(self, name: str) -> torch.Tensor:
        """Return the memory of a tensor by its name: a view of some rows of a packed tensor."""
        module, _, last = name.rpartition(".")
        if module in self._packed_rows:
            linear, rows = self._packed_rows[module]
            whole = linear.weight if last == "weight" else linear.bias
            assert whole is not None
            return whole[rows]
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        if match is None:
            assert self._embedding is not None
            assert self._norm is not None
            assert self._head is not None
            return {
                "model.embed_tokens": self._embedding,
                "model.norm": self._norm,
                "lm_head": self._head.weight,
            }[module]
        layer = self._layers[int(match[1])]
        if match[2] in ("self_attn.q_norm", "self_attn.k_norm"):
            assert layer.qk_norm is not None
            norms, heads = layer.qk_norm.weight, self.config.num_heads
            return norms[:heads] if match[2].endswith("q_norm") else norms[heads:]
        return {
            "input_layernorm": layer.attention_norm,
            "post_attention_layernorm": layer.mlp_norm,
        }[match[2]]

    def forward(
        self,
        tokens: torch.Tensor,
        attention: Attention,
        adapted: Sequence[ProductUpdates] = (),
        embedded: StepEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T] int64 after the final norm.

        Call ``attention.begin`` with the step's layout first. ``adapted`` add the LoRA updates of
        the step; it is empty if no token has an adapter. ``embedded`` stand in place of the tokens'
        embeddings.
        """
        residual = self.embed(tokens)
        if embedded is not None:
            put_embeddings(residual, embedded)
        return self.go_on(residual, attention, adapted)

    def go_on(
        self, residual: torch.Tensor, attention: Attention, adapted: Sequence[ProductUpdates] = ()
    ) -> torch.Tensor:
        """Return the hidden states [T, E] behind this model's layers, as :meth:`forward` does.

        ``residual`` [T, E] are those before its layers, and are overwritten. If another stage has
        the final norm, what is returned are the states before that stage's layers.
        """

        def project(index: int, name: str, linear: Linear, x: torch.Tensor) -> torch.Tensor:
            y = linear(x)
            for updates in adapted:
                updates.update(index, name, x, y)
            return y

        config, operations = self.config, self._operations
        eps = config.rms_norm_eps
        heads = (config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        # Each norm is fused with the addition before it, so a layer ends with the next one's norm.
        norms = [layer.attention_norm for layer in self._layers]
        if self._norm is not None:
            norms.append(self._norm)
        h = operations.rms_norm(residual, norms[0], eps)
        for index, layer in enumerate(self._layers):
            qkv = project(index, "qkv", layer.qkv, h).view(-1, *heads)
            q = attention.rope_and_write(index, qkv, layer.rotate, layer.qk_norm)
            attended = attention.attend(index, q, layer.window).flatten(1)
            output = self._ranks.all_reduce(project(index, "output", layer.output, attended))
            h = operations.add_rms_norm(output, residual, layer.mlp_norm, eps)
            if isinstance(layer.mlp, Experts):
                down = layer.mlp.forward(h, operations, self._ranks)
            else:
                gated = operations.silu_mul(project(index, "gate_up", layer.mlp.gate_up, h))
                down = self._ranks.all_reduce(project(index, "down", layer.mlp.down, gated))
            if index + 1 == len(norms):
                return residual.add_(down)
            h = operations.add_rms_norm(down, residual, norms[index + 1], eps)
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits [R, V] float32 of hidden states [R, E], in ``out`` if it is given."""
        assert self._head is not None
        if self._part is None:
            return self._head.in_float32(hidden, out)
        joined = self._ranks.all_gather(self._head.in_float32(hidden))[:, : self.vocab_size]
        return joined if out is None else out.copy_(joined)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, E] of ``tokens`` [T] int64."""
        assert self._embedding is not None
        if self._part is None:
            return F.embedding(tokens, self._embedding)
        own = tokens - self._part.first_token
        elsewhere = (own < 0) | (own >= len(self._embedding))
        embedded = F.embedding(own.masked_fill(elsewhere, 0), self._embedding)
        return self._ranks.all_reduce(embedded.masked_fill(elsewhere[:, None], 0))


def put_embeddings(residual: torch.Tensor, embedded: StepEmbeddings) -> None:
    """Overwrite rows of ``residual`` [T, E] with embeddings, in its dtype."""
    rows = upload(embedded.rows, residual.device).to(residual.dtype)
    residual.index_copy_(0, upload(embedded.places, residual.device), rows)


class _LayerBuilder:
    """Builds the layers of one model, and records where each module is packed."""

    def __init__(self, config: ModelConfig, tensors: NamedTensors, part: ModelPart | None) -> None:
        self._config = config
        self._tensors = tensors
        self._part = part
        self.packed_rows: dict[str, tuple[Linear, slice]] = {}
        """By a module's name: the packed product that it is part of, and its rows there."""

    def layer(self, index: int) -> _Layer:
        """Build a layer from its tensors."""
        config, tensors = self._config, self._tensors
        prefix, hidden = f"model.layers.{index}.", config.hidden_size
        shapes = packed_shapes(config, index)
        experts = config.experts_of(index)
        return _Layer(
            attention_norm=tensors.take(prefix + "input_layernorm.weight", hidden),
            qkv=self._linear(prefix, shapes["qkv"]),
            qk_norm=self._qk_norm(prefix) if config.qk_norm else None,
            output=self._linear(prefix, shapes["output"]),
            mlp_norm=tensors.take(prefix + "post_attention_layernorm.weight", hidden),
            mlp=self._mlp(prefix, shapes) if experts is None else self._experts(prefix, experts),
            window=config.windows[index],
            rotate=config.rope_layers[index],
        )

    def _qk_norm(self, prefix: str) -> QkNorm:
        config = self._config
        norms = (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads))
        weights = [
            self._tensors.take(f"{prefix}self_attn.{name}.weight", config.head_dim).expand(
                heads, -1
            )
            for name, heads in norms
        ]
        return QkNorm(torch.cat(weights), config.rms_norm_eps)

    def _mlp(self, prefix: str, shapes: Mapping[str, PackedShape]) -> Mlp:
        return Mlp(
            gate_up=self._linear(prefix, shapes["gate_up"]),
            down=self._linear(prefix, shapes["down"]),
        )

    def _experts(self, prefix: str, experts: ExpertsConfig) -> Experts:
        config = self._config
        router = PackedShape({"mlp.gate": experts.count}, config.hidden_size, bias=False)
        return Experts(
            config=experts,
            router=self._linear(prefix, router),
            experts=[
                self._mlp(prefix, expert_shapes(config, experts, number))
                if self._part is None or self._part.has_expert(number)
                else None
                for number in range(experts.count)
            ],
        )

    def _linear(self, prefix: str, shape: PackedShape) -> Linear:
        """Pack the modules of a product into one."""
        take, sizes = self._tensors.take, shape.outputs
        weight = torch.cat(
            [take(f"{prefix}{part}.weight", size, shape.inputs) for part, size in sizes.items()]
        )
        bias = None
        if shape.bias:
            bias = torch.cat([take(f"{prefix}{part}.bias", size) for part, size in sizes.items()])
        linear, first = Linear(weight, bias), 0
        for part, size in sizes.items():
            self.packed_rows[prefix + part] = linear, slice(first, first + size)
            first += size
        return linear
