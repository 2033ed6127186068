"""A transformers model with the executor's interface: hidden states, then logits of some rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu.cpu.torch_model import TorchModel
from gpu.lora.updates import ProductUpdates
from gpu.models.decoder import put_embeddings
from gpu.models.step_embeddings import StepEmbeddings
from gpu.models.transformers_models.attention import PagedLayers
from gpu.models.transformers_models.interface import using_backend
from gpu.slots import Row, SlotTable


class _BodyOutput(tuple[torch.Tensor]):
    """The output of a body of any class, with nothing but the hidden states [1, R, E]."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Return None for every other field, such as router logits."""


class ImageModel(TorchModel[PagedLayers]):
    """:class:`gpu.cpu.model.CpuModel` of a decoder that sees whole images."""

    def forward(
        self, rows: Sequence[Row], slots: SlotTable
    ) -> tuple[torch.Tensor, npt.NDArray[np.integer]]:
        """See :meth:`gpu.cpu.model.CpuModel.forward`."""
        self._attention.see_images({row.slot.number: row.slot.grids for row in rows})
        return super().forward(rows, slots)


class TransformersDecoder:
    """A ``…ForCausalLM`` in evaluation mode: its body for every token, its head for some.

    The head includes everything after the body, such as soft caps, scales and norms. It is computed
    by the class's own ``forward`` with a body that returns the given hidden states.
    """

    def __init__(self, model: Any) -> None:
        from transformers import PreTrainedModel

        self.model = model
        body = model.get_decoder()
        # In a few families get_decoder() returns another module, such as the head.
        self.body: Any = body if isinstance(body, PreTrainedModel) else model.base_model

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def forward(
        self,
        tokens: torch.Tensor,
        attention: PagedLayers,
        adapted: Sequence[ProductUpdates] = (),
        embedded: StepEmbeddings | None = None,
    ) -> torch.Tensor:
        """Return the hidden states [T, E] of ``tokens`` [T] int64.

        Call ``attention.begin`` with the step's layout first. Adapters aren't supported.
        ``embedded`` are what the class calls ``inputs_embeds``.
        """
        assert not adapted
        given: dict[str, torch.Tensor] = {"input_ids": tokens[None]}
        if embedded is not None:
            residual = self.model.get_input_embeddings()(tokens)
            put_embeddings(residual, embedded)
            given = {"inputs_embeds": residual[None]}
        with using_backend(attention):
            output = self.body(**given, position_ids=attention.positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [R, V] of hidden states [R, E]."""
        # At most the number of tokens is used.
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64)
        with self._body_returning(hidden):
            logits: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
        return logits

    @contextlib.contextmanager
    def _body_returning(self, hidden: torch.Tensor) -> Iterator[None]:
        """Make the body return ``hidden`` in the block, without computing anything."""
        output = _BodyOutput((hidden[None],))
        self.body.forward = lambda *_, **__: output
        try:
            yield
        finally:
            del self.body.forward
