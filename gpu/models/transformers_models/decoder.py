"""A model of transformers as the executor takes it: hidden states first, logits where wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpu.lora.updates import ProductUpdates
from gpu.models.transformers_models.attention import PagedLayers
from gpu.models.transformers_models.interface import answering


class _Given(tuple[torch.Tensor]):
    """The output of a body of any class, reduced to the hidden states [1, R, E]."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None for router logits, cross attentions and other fields that aren't computed."""


class TransformersDecoder:
    """A ``…ForCausalLM`` in evaluation mode: its body for every token, its head for some.

    The head is all that the class does after its body: final soft caps, scales and norms too. It is
    the class's own ``forward``, in which the body gives the hidden states that are handed in.
    """

    def __init__(self, model: Any) -> None:
        from transformers import PreTrainedModel

        self.model = model
        body = model.get_decoder()
        # Of what is left by that name in a few families, one is the head.
        self.body: Any = body if isinstance(body, PreTrainedModel) else model.base_model

    @property
    def dtype(self) -> torch.dtype:
        """The number format of weights and activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def forward(
        self,
        tokens: torch.Tensor,
        attention: PagedLayers,
        adapted: Sequence[ProductUpdates] = (),
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T] int64, which the head takes.

        ``attention`` knows the rows: its ``begin`` was called with the step's layout. Adapters
        aren't served.
        """
        assert not adapted
        with answering(attention):
            output = self.body(
                input_ids=tokens[None], position_ids=attention.positions[None], use_cache=False
            )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] that follow from rows [R, E] of :meth:`forward`'s result."""
        # The tokens are only counted, if that.
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64)
        with self._giving(hidden):
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits

    @contextlib.contextmanager
    def _giving(self, hidden: torch.Tensor) -> Iterator[None]:
        """In the block the body computes nothing and gives ``hidden``."""
        given = _Given((hidden[None],))
        self.body.forward = lambda *_, **__: given
        try:
            yield
        finally:
            del self.body.forward
