"""The forward pass of one of several stages, from hidden states to hidden states.

They are at fixed addresses, so that a graph may read and write them. From stage to stage they go
through the memory of the host, which waits for them.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from gpu.cuda.forward import ADAPTED, ForwardPass
from gpu.kernels import KernelLoader
from gpu.models.decoder import Decoder
from gpu.models.parallel.leading import raw
from gpu.models.parallel.stages import Stage
from gpu.models.step_embeddings import StepEmbeddings


class StageForward(ForwardPass):
    """The launches from the input tokens of a step, or from states of another stage, to states.

    The states behind the layers of the last ``stage`` are those behind the final norm.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        model: Decoder,
        stage: Stage,
        max_tokens: int,
        **parts: Any,
    ) -> None:
        super().__init__(loader, model=model, max_tokens=max_tokens, **parts)
        self.stage = stage
        size, device = model.config.hidden_size, loader.device
        before = 0 if stage.is_first else max_tokens
        self._before = torch.zeros(before, size, dtype=model.dtype, device=device)
        self._behind = torch.zeros(max_tokens, size, dtype=model.dtype, device=device)

    def begin_with(self, states: torch.Tensor) -> None:
        """Set the states [T, E] with which the layers of the next step begin."""
        self._before[: len(states)].copy_(states)

    def states(self, num_tokens: int) -> torch.Tensor:
        """Return the states behind the layers [T, E] of the step launched last."""
        return self._behind[:num_tokens]

    def sent_states(self, num_tokens: int) -> npt.NDArray[Any]:
        """Return :meth:`states` as bytes in the host's memory, once they are computed."""
        return raw(self.states(num_tokens).cpu())

    def run(
        self, num_tokens: int, *, adapted: bool, embedded: StepEmbeddings | None = None
    ) -> torch.Tensor:
        """See :meth:`ForwardPass.run`."""
        if self.stage.is_first:
            hidden = super().run(num_tokens, adapted=adapted, embedded=embedded)
        else:
            self.state.scatter()
            # The layers overwrite what they begin with: padding would grow with each replay.
            before = self._before[:num_tokens].clone()
            hidden = self.model.go_on(before, self.attention, self.updates(adapted))
        return self.states(num_tokens).copy_(hidden)

    def _run_padded(self, kind: str, size: int) -> torch.Tensor:
        return self.run(size, adapted=kind == ADAPTED)
