"""The interface of logits processors: the user's classes that change logits before sampling.

``trioserve serve --logits-processors module:Class`` names them; the worker imports and creates them
at its start. Code from a client is never executed: a request only passes parameters
(``vllm_xargs``, ``custom_params`` or ``SamplingParams.extra_args``), which a processor reads.

A processor for requests with ``{"target_token": 42}``::

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
    """The environment of a processor, passed to its constructor."""

    vocab_size: int
    max_num_seqs: int
    """The number of slots; they are numbered from 0."""
    device: str
    """Device of the logits, by torch's name."""
    model: str
    """The model's folder or GGUF file."""


@attrs.frozen(kw_only=True, eq=False)
class ProcessorRow:
    """One sequence that is to get a token.

    ``tokens`` is int32, the prompt and the whole output so far; the first ``prompt_length`` are the
    prompt. A processor's state of a sequence must follow from these and the arguments: a sequence
    that was preempted, or that lost its worker, is opened again.
    """

    index: int
    """The sequence's row of the logits and of the bias."""
    slot: int
    tokens: npt.NDArray[np.int32]
    prompt_length: int


class LogitsProcessor(Protocol):
    """The interface of a processor's class, besides a constructor that takes the context."""

    @property
    def parameters(self) -> Collection[str]:
        """The names of the parameters that it takes; a class attribute will do.

        A request with a parameter unknown to every processor of the server is refused.
        """
        ...

    def check(self, args: Mapping[str, Any]) -> bool:
        """Return True if this processor handles a request with these arguments.

        This may be called in any thread, before the request is admitted.

        Raises:
            ValueError: An argument is wrong; the client gets the text with status 400.
        """
        ...

    def open(self, slot: int, args: Mapping[str, Any]) -> None:
        """Start a sequence in ``slot``; :meth:`check` returned true for its arguments."""
        ...

    def close(self, slot: int) -> None:
        """Forget the sequence in ``slot``, which has left."""
        ...

    def apply(self, logits: Tensor, bias: Tensor, rows: Sequence[ProcessorRow]) -> None:
        """Add this processor's changes to ``bias`` for ``rows``.

        Args:
            logits: [R, vocab_size] float32, the model's own; not to be changed.
            bias: [R, vocab_size] float32, changed in place: it has what earlier processors put
                there. ``-inf`` keeps a token from being drawn.
            rows: those of the R rows that this processor sees.
        """
        ...
