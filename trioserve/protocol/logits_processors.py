"""Logits processors of the user's own: classes that change logits before a token is drawn.

``trioserve serve --logits-processors module:Class`` names them; the worker imports and makes them
at its start. Nothing that a client sends is ever executed: a request only passes parameters
(``vllm_xargs``, ``custom_params`` or ``SamplingParams.extra_args``), which a processor looks at.

A processor for everybody who sends ``{"target_token": 42}``::

    class TargetToken:
        parameters = ("target_token",)

        def __init__(self, context: ProcessorContext) -> None:
            self.targets: dict[int, int] = {}

        def check(self, args: Mapping[str, Any]) -> bool:
            if "target_token" not in args:
                return False
            if not isinstance(args["target_token"], int):
                raise ValueError("target_token must be a token id")
            return True

        def open(self, slot: int, args: Mapping[str, Any]) -> None:
            self.targets[slot] = args["target_token"]

        def close(self, slot: int) -> None:
            del self.targets[slot]

        def apply(self, logits, bias, rows) -> None:
            for row in rows:
                keep = bias[row.index, self.targets[row.slot]].clone()
                bias[row.index] = -torch.inf
                bias[row.index, self.targets[row.slot]] = keep
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Tensor: TypeAlias = Any
"""``torch.Tensor``, which isn't imported here: this package does without torch."""


@attrs.frozen(kw_only=True)
class ProcessorContext:
    """What a processor is made with."""

    vocab_size: int
    max_num_seqs: int
    """Slots are numbered from 0 to one less than this."""
    device: str
    """torch's name of the device that the logits are on."""
    model: str
    """The model's folder or GGUF file."""


@attrs.frozen(kw_only=True, eq=False)
class ProcessorRow:
    """One sequence that is to get a token.

    ``tokens`` is int32, the prompt and the whole output so far, of which the first
    ``prompt_length`` are the prompt. Whatever a processor remembers of a sequence must follow from
    these and the arguments: a sequence that was preempted, or whose worker died, is opened again.
    """

    index: int
    """Which row of the logits and of the bias is this sequence's."""
    slot: int
    tokens: npt.NDArray[np.int32]
    prompt_length: int


class LogitsProcessor(Protocol):
    """What a processor's class has to have, besides a constructor that takes the context."""

    @property
    def parameters(self) -> Collection[str]:
        """The names of the parameters that it takes; an attribute of the class will do.

        A request with a parameter that no processor of the server takes is refused.
        """
        ...

    def check(self, args: Mapping[str, Any]) -> bool:
        """Whether this processor is to see a request with these arguments.

        May be called in any thread, before the request is admitted.

        Raises:
            ValueError: an argument is wrong; the text reaches the client with status 400.
        """
        ...

    def open(self, slot: int, args: Mapping[str, Any]) -> None:
        """A sequence, for which :meth:`check` said yes, has got ``slot``."""
        ...

    def close(self, slot: int) -> None:
        """The sequence in ``slot`` has left."""
        ...

    def apply(self, logits: Tensor, bias: Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Say what to add to the logits of ``rows``.

        Args:
            logits: [R, vocab_size] float32, the model's own; not to be changed.
            bias: [R, vocab_size] float32, changed in place: it has what earlier processors put
                there. ``-inf`` keeps a token from being drawn.
            rows: those of the R rows that this processor sees.
        """
        ...
