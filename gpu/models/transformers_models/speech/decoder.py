"""The decoder of a Whisper model: transformers' modules over paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gpu.attention import StepLayout
from gpu.cpu.torch_model import TorchModel
from gpu.lora.torch_adapters import TokenGroup
from gpu.models.step_embeddings import StepEmbeddings
from gpu.models.transformers_models.attention import LayerShape
from gpu.models.transformers_models.interface import AttentionCall
from gpu.models.transformers_models.speech.attention import (
    KeysAndValues,
    Layers,
    SpeechAttention,
)
from gpu.slots import Row, SlotTable


class DecoderAttention(Protocol):
    """The attention of a decoder's layers over T tokens and over their audio."""

    positions: torch.Tensor
    """Positions of the tokens, [T]."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention over the tokens, [T, heads, head_dim]."""
        ...

    def attend_audio(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return that over the audio of ``query`` [heads, T, head_dim], scaled already."""
        ...


class SpeechDecoder:
    """The decoder with its head, in evaluation mode.

    Args:
        model: A ``WhisperForConditionalGeneration``.
    """

    def __init__(self, model: Any) -> None:
        self._body = model.model.decoder
        self._head = model.proj_out
        self.dtype: torch.dtype = model.dtype

    @property
    def layer_shapes(self) -> list[LayerShape]:
        """Shapes of the layers' attention over the tokens."""
        return [
            LayerShape(
                num_heads=layer.self_attn.num_heads,
                num_kv_heads=layer.self_attn.num_heads,
                head_dim=layer.self_attn.head_dim,
                value_dim=layer.self_attn.head_dim,
                window=None,
            )
            for layer in self._body.layers
        ]

    def project(self, states: torch.Tensor) -> Layers:
        """Return the keys and values of encoder states [S, E] in each layer."""
        return [self.project_in(layer, states) for layer in range(len(self._body.layers))]

    def project_in(self, layer: int, states: torch.Tensor) -> KeysAndValues:
        """Return the keys and values of encoder states [S, E] in one layer."""
        attention = self._body.layers[layer].encoder_attn
        states = states.to(self.dtype)
        return (
            _heads(attention, attention.k_proj(states)),
            _heads(attention, attention.v_proj(states)),
        )

    def forward(
        self,
        tokens: torch.Tensor,
        attention: DecoderAttention,
        adapted: Sequence[TokenGroup] = (),
        embedded: StepEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T]; ``attention`` has begun the step.

        There are no adapters, and no embeddings in place of tokens.
        """
        assert not adapted
        assert embedded is None
        hidden = self._body.embed_tokens(tokens) * self._body.embed_scale
        hidden = hidden + self._body.embed_positions.weight[attention.positions]
        for index, layer in enumerate(self._body.layers):
            normed = layer.self_attn_layer_norm(hidden)
            hidden = hidden + _over_tokens(layer.self_attn, normed, attention, index)
            normed = layer.encoder_attn_layer_norm(hidden)
            hidden = hidden + _over_audio(layer.encoder_attn, normed, attention, index)
            normed = layer.final_layer_norm(hidden)
            hidden = hidden + layer.fc2(layer.activation_fn(layer.fc1(normed)))
        last: torch.Tensor = self._body.layer_norm(hidden)
        return last

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of hidden states [R, E]."""
        logits: torch.Tensor = self._head(hidden)
        return logits


class SpeechModel(TorchModel[SpeechAttention]):
    """:class:`gpu.cpu.model.CpuModel` of a Whisper model."""

    def _hidden(
        self, tokens: torch.Tensor, rows: Sequence[Row], layout: StepLayout, slots: SlotTable
    ) -> torch.Tensor:
        # What slots bring as embeddings is their audio.
        self._attention.begin_audio(rows, slots)
        return self._decoder.forward(tokens, self._attention)


def _heads(attention: Any, projected: torch.Tensor) -> torch.Tensor:
    """Return [T, E] as [heads, T, head_dim]."""
    shaped = projected.view(-1, attention.num_heads, attention.head_dim)
    return shaped.transpose(0, 1).contiguous()


def _over_tokens(
    attention: Any, normed: torch.Tensor, over: DecoderAttention, layer: int
) -> torch.Tensor:
    # Whisper scales the queries, and rounds them, before the products with the keys.
    call = AttentionCall(
        layer=layer,
        query=_heads(attention, attention.q_proj(normed) * attention.scaling)[None],
        key=_heads(attention, attention.k_proj(normed))[None],
        value=_heads(attention, attention.v_proj(normed))[None],
        mask=None,
        scale=1.0,
        softcap=None,
        sinks=None,
        others={},
    )
    result: torch.Tensor = attention.out_proj(over.attend(call).reshape(len(normed), -1))
    return result


def _over_audio(
    attention: Any, normed: torch.Tensor, over: DecoderAttention, layer: int
) -> torch.Tensor:
    query = _heads(attention, attention.q_proj(normed) * attention.scaling)
    attended = over.attend_audio(layer, query).transpose(0, 1)
    result: torch.Tensor = attention.out_proj(attended.reshape(len(normed), -1))
    return result
