"""Constraints on a slot's draws: allowed ids, bad words, grammars, the user's processors.

All of it follows from a slot's tokens and parameters. A grammar's matcher has consumed a part of
the slot's output, and consumes what is new before it says what may come next: so a slot that was
preempted, or that lost its worker, catches up when it is opened again.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from gpu.constraints.lazy_grammars import Grammars
from gpu.constraints.processors import Processors
from gpu.constraints.refusals import GrammarError, one_line
from gpu.sampling.adjustments import Adjustment, Logits
from gpu.slots import PlanError, Slot
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.logits_processors import ProcessorRow
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import ints

if TYPE_CHECKING:
    import llguidance
    import torch

ROWS_FOR_THREADS = 16
"""From so many rows on, masks of grammars are computed in several threads: a mask takes from 3 µs,
inside a string, to milliseconds, and handing it to another thread a few microseconds."""

_log = logging.getLogger("gpu.constraints")

Mask = npt.NDArray[np.int32]
"""Rows of :attr:`gpu.sampling.adjustments.Adjustment.bitmask`, or one of them."""


@attrs.define(eq=False)
class _Matching:
    """A grammar's matcher, and how much of the slot's output it has consumed."""

    matcher: llguidance.LLMatcher
    consumed: int = 0

    def catch_up(self, output: npt.NDArray[np.int32]) -> None:
        """Consume what is new of ``output``. A token that doesn't fit leaves an error."""
        new = output[self.consumed :].tolist()
        self.consumed += len(new)
        for token in new:  # one by one, since many at once may not go past an end
            self.matcher.consume_token(token)


@attrs.define(eq=False, kw_only=True)
class _Constrained:
    """The constraints on one slot's draws."""

    always: Mask | None
    """Mask of the tokens that may ever be drawn; None for all."""
    words: dict[int, list[list[int]]]
    """Bad words of at least two tokens, by the last but one."""
    matching: _Matching | None
    processed: bool

    @property
    def masks(self) -> bool:
        return self.always is not None or bool(self.words) or self.matching is not None


class Constraints:
    """:class:`gpu.sampling.adjustments.Adjuster` of a model.

    Args:
        vocab_size: the model's.
        grammars: compiles the slots' grammars.
        processors: the user's own.
        num_threads: how many may compute masks at once.
    """

    def __init__(
        self,
        vocab_size: int,
        grammars: Grammars,
        processors: Processors | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._grammars = grammars
        self._processors = Processors() if processors is None else processors
        self._num_threads = num_threads
        self._open: dict[int, _Constrained] = {}

    @functools.cached_property
    def _threads(self) -> llguidance.LLExecutor:
        import llguidance  # as soon as there are grammars

        return llguidance.LLExecutor(self._num_threads)

    def prepare(
        self,
        grammar: Grammar | None,
        extra_args: Mapping[str, Any],
        processors: Sequence[str] = (),
    ) -> dict[str, str] | int:
        """Return whether a request with these can be served: compiles the one and checks the
        others.

        For any thread. Returns the bytes that the grammar takes, or what is wrong (``error``) with
        which of them (``param``).
        """
        try:
            self._processors.bring(processors)
            taken = self._processors.check(extra_args, processors)
        except ModelLoadError as error:
            return {"error": str(error), "param": "logits_processors"}
        except ValueError as error:
            return {"error": str(error), "param": "extra_args"}
        not_taken = self._processors.not_taken(extra_args, processors)
        if extra_args and not taken:
            not_taken = sorted(extra_args)
        if not_taken:
            names = ", ".join(not_taken)
            return {
                "error": f"no logits processor of this server (--logits-processors) takes {names}",
                "param": "extra_args",
            }
        if grammar is not None:
            try:
                return self._grammars.prepare(grammar)
            except GrammarError as error:
                return {"error": f"grammar: {error}", "param": "grammar"}
        return 0

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.sampling.adjustments.Adjuster.open`.

        Raises:
            PlanError: the grammar can't be compiled, or a processor failed.
        """
        params = slot.sampler
        self._open.pop(slot.number, None)
        constrained = _Constrained(
            always=self._always(params),
            words=_by_last_but_one(params.bad_words),
            matching=self._matching(slot),
            processed=self._processors.open(
                slot.number, params.extra_args, params.logits_processors
            ),
        )
        if constrained.masks or constrained.processed:
            self._open[slot.number] = constrained

    def close(self, number: int) -> None:
        """See :meth:`gpu.sampling.adjustments.Adjuster.close`."""
        self._open.pop(number, None)
        self._processors.close(number)

    def shut_down(self) -> None:
        """End the processes that try out grammars. Nothing more is to be prepared."""
        self._grammars.close()

    def adjusts(self, slot: Slot) -> bool:
        """See :meth:`gpu.sampling.adjustments.Adjuster.adjusts`."""
        return slot.number in self._open

    def needs_last_token(self, slot: Slot) -> bool:
        """See :meth:`gpu.sampling.adjustments.Adjuster.needs_last_token`."""
        found = self._open.get(slot.number)
        return found is not None and bool(found.words or found.matching or found.processed)

    def adjustment(self, logits: Logits, slots: Sequence[Slot]) -> Adjustment:
        """See :meth:`gpu.sampling.adjustments.Adjuster.adjustment`.

        Raises:
            PlanError: a processor failed.
        """
        found = {
            row: (slot, constrained)
            for row, slot in enumerate(slots)
            if not slot.stopped and (constrained := self._open.get(slot.number)) is not None
        }
        return Adjustment(bias=self._bias(logits, found), bitmask=self._bitmask(len(logits), found))

    def _bias(
        self, logits: Logits, found: Mapping[int, tuple[Slot, _Constrained]]
    ) -> torch.Tensor | None:
        rows = [
            ProcessorRow(
                index=row,
                slot=slot.number,
                tokens=slot.tokens,
                prompt_length=slot.prompt_length,
            )
            for row, (slot, constrained) in found.items()
            if constrained.processed
        ]
        if not rows:
            return None
        import torch  # only processors work with it

        with torch.inference_mode():  # no gradient is needed
            tensor = torch.as_tensor(logits)
            bias = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            self._processors.apply(tensor, bias, rows)
        return bias

    def _bitmask(
        self, num_rows: int, found: Mapping[int, tuple[Slot, _Constrained]]
    ) -> Mask | None:
        masked = {row: each for row, each in found.items() if each[1].masks}
        if not masked:
            return None
        masks = np.full((num_rows, self._num_words), -1, dtype=np.int32)
        self._mask_by_grammars(masks, masked)
        for row, (slot, constrained) in masked.items():
            if constrained.always is not None:
                masks[row] &= constrained.always
            output = slot.tokens[slot.prompt_length :]
            if constrained.words and len(output):
                for word in constrained.words.get(int(output[-1]), ()):
                    if _ends_with(output, word[:-1]):
                        _forbid(masks[row], word[-1])
        return masks

    def _mask_by_grammars(
        self, masks: Mask, masked: Mapping[int, tuple[Slot, _Constrained]]
    ) -> None:
        matchers: list[tuple[llguidance.LLMatcher, int]] = []
        for row, (slot, constrained) in masked.items():
            if constrained.matching is not None:
                constrained.matching.catch_up(slot.tokens[slot.prompt_length :])
                matchers.append((constrained.matching.matcher, row))
        address, num_bytes = masks.ctypes.data, masks.strides[0]
        if len(matchers) >= ROWS_FOR_THREADS:
            self._threads.unsafe_compute_mask_ptr(matchers, address, num_bytes, len(masks))
        else:
            for matcher, row in matchers:
                matcher.unsafe_compute_mask_ptr(address + row * num_bytes, num_bytes)
        for matcher, row in matchers:
            if matcher.is_error():
                # The sequence ends with an error, for there is nothing to draw.
                why = one_line(matcher.get_error())
                _log.warning("slot %d has no token to draw: %s", masked[row][0].number, why)
                masks[row] = 0

    def _always(self, params: SamplerParams) -> Mask | None:
        banned = [word[0] for word in params.bad_words if len(word) == 1]
        if not banned:
            allowed = params.allowed_token_ids
            return _allowing(allowed, self._num_words) if allowed else None
        mask = _allowing(params.allowed_token_ids, self._num_words).copy()
        for token in banned:
            _forbid(mask, token)
        return mask

    def _matching(self, slot: Slot) -> _Matching | None:
        grammar = slot.sampler.grammar
        if grammar is None:
            return None
        try:
            return _Matching(self._grammars.matcher(grammar))
        except GrammarError as error:
            raise PlanError(f"the grammar of slot {slot.number}: {error}", slot.number) from error


@functools.lru_cache(maxsize=8)
def _allowing(column: bytes, num_words: int) -> Mask:
    """Return the mask of the ids in ``column``, or of all for an empty one. It isn't to be changed.

    The outputs of a request have the same.
    """
    if not column:
        return np.full(num_words, -1, dtype=np.int32)
    allowed = np.zeros(num_words * 32, dtype=np.bool_)
    allowed[ints(column)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


def _by_last_but_one(words: list[list[int]]) -> dict[int, list[list[int]]]:
    """Return the ``words`` of at least two tokens: a draw looks at those alone that may end."""
    found: dict[int, list[list[int]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _ends_with(output: npt.NDArray[np.int32], tokens: list[int]) -> bool:
    return bool(output[-len(tokens) :].tolist() == tokens)


def _forbid(mask: Mask, token: int) -> None:
    mask.view(np.uint32)[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
