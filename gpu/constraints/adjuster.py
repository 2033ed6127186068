"""Constraints on sampled tokens: allowed ids, bad words, grammars, logits processors.

They are a function of a slot's tokens and parameters. Before each mask, a grammar's matcher
consumes the output that it hasn't seen yet. A sequence that was preempted, or whose worker died,
thus catches up when its slot is opened again.
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
"""Fewest rows whose grammar masks are computed in several threads. A mask takes 3 µs (inside a
string) to milliseconds, and handing it to another thread a few microseconds."""

_log = logging.getLogger("gpu.constraints")

Mask = npt.NDArray[np.int32]
"""One or several rows of :attr:`gpu.sampling.adjustments.Adjustment.bitmask`."""


@attrs.define(eq=False)
class _MatcherState:
    """A grammar's matcher, and the number of output tokens of ``slot`` that it has consumed."""

    matcher: llguidance.LLMatcher
    slot: Slot
    consumed: int = 0

    def copy_for(self, slot: Slot) -> _MatcherState | None:
        """Return a copy for a slot whose output begins with what was consumed, or else None.

        So a beam that continues another one consumes one token, not its whole output.
        """
        if slot.sampler.grammar != self.slot.sampler.grammar or not self.consumed:
            return None
        consumed, begin = self.consumed, slot.prompt_length
        own = self.slot.tokens[self.slot.prompt_length :][:consumed]
        if not np.array_equal(slot.tokens[begin : begin + consumed], own):
            return None
        return _MatcherState(self.matcher.deep_copy(), slot, consumed)

    def catch_up(self, output: npt.NDArray[np.int32]) -> None:
        """Consume the new tokens of ``output``. One that doesn't fit puts the matcher in error."""
        new = output[self.consumed :].tolist()
        self.consumed += len(new)
        for token in new:  # one by one, since consume_tokens refuses any after the grammar's end
            self.matcher.consume_token(token)


@attrs.define(eq=False, kw_only=True)
class _SlotConstraints:
    """The constraints of one slot."""

    always: Mask | None
    """Mask for every token of the output; None if it allows all."""
    words: dict[int, list[list[int]]]
    """Bad words of at least two tokens, by the second-last one."""
    matching: _MatcherState | None
    processed: bool

    @property
    def masks(self) -> bool:
        return self.always is not None or bool(self.words) or self.matching is not None


class Constraints:
    """The :class:`gpu.sampling.adjustments.Adjuster` of a model.

    Args:
        vocab_size: the model's.
        grammars: compiles grammars.
        processors: the logits processors.
        num_threads: number of threads that compute masks.
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
        self._open: dict[int, _SlotConstraints] = {}

    @functools.cached_property
    def _threads(self) -> llguidance.LLExecutor:
        import llguidance  # takes memory that servers without grammars save

        return llguidance.LLExecutor(self._num_threads)

    def answer(self, arguments: Mapping[str, Any]) -> dict[str, str] | int:
        """Answer the call ``prepare``: see :meth:`prepare`."""
        grammar = arguments["grammar"]
        return self.prepare(
            None if grammar is None else Grammar(*grammar),
            arguments["extra_args"],
            arguments.get("logits_processors", ()),
            tried=arguments.get("tried", False),
        )

    def prepare(
        self,
        grammar: Grammar | None,
        extra_args: Mapping[str, Any],
        processors: Sequence[str] = (),
        *,
        tried: bool = False,
    ) -> dict[str, str] | int:
        """Compile a request's grammar, load its processors and check its ``extra_args``.

        Call it in any thread. Return the bytes of the compiled grammar, or a dict with the
        ``error`` and the ``param`` at fault. With ``tried``, a worker of this model has compiled
        the grammar before.
        """
        try:
            self._processors.load(processors)
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
                return self._grammars.prepare(grammar, tried=tried)
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
        constrained = _SlotConstraints(
            always=self._always(params),
            words=_by_second_last(params.bad_words),
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
        """End the child processes that compile grammars. Don't call :meth:`prepare` afterwards."""
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
        self, logits: Logits, found: Mapping[int, tuple[Slot, _SlotConstraints]]
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
        import torch  # only logits processors need it

        with torch.inference_mode():
            tensor = torch.as_tensor(logits)
            bias = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)
            self._processors.apply(tensor, bias, rows)
        return bias

    def _bitmask(
        self, num_rows: int, found: Mapping[int, tuple[Slot, _SlotConstraints]]
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
        self, masks: Mask, masked: Mapping[int, tuple[Slot, _SlotConstraints]]
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
                # With all tokens masked, the sequence ends with an error.
                why = one_line(matcher.get_error())
                _log.warning("slot %d has no token to draw: %s", masked[row][0].number, why)
                masks[row] = 0

    def _always(self, params: SamplerParams) -> Mask | None:
        banned = [word[0] for word in params.bad_words if len(word) == 1]
        if not banned:
            allowed = params.allowed_token_ids
            return _allowed_mask(allowed, self._num_words) if allowed else None
        mask = _allowed_mask(params.allowed_token_ids, self._num_words).copy()
        for token in banned:
            _forbid(mask, token)
        return mask

    def _matching(self, slot: Slot) -> _MatcherState | None:
        grammar = slot.sampler.grammar
        if grammar is None:
            return None
        others = [each.matching for each in self._open.values() if each.matching is not None]
        copies = filter(None, (other.copy_for(slot) for other in others))
        if (copied := next(copies, None)) is not None:
            return copied
        try:
            return _MatcherState(self._grammars.matcher(grammar), slot)
        except GrammarError as error:
            raise PlanError(f"the grammar of slot {slot.number}: {error}", slot.number) from error


@functools.lru_cache(maxsize=8)
def _allowed_mask(column: bytes, num_words: int) -> Mask:
    """Return the mask that allows the ids in ``column``, or all if it is empty. Don't change it.

    It is cached because the outputs of one request share it.
    """
    if not column:
        return np.full(num_words, -1, dtype=np.int32)
    allowed = np.zeros(num_words * 32, dtype=np.bool_)
    allowed[ints(column)] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


def _by_second_last(words: list[list[int]]) -> dict[int, list[list[int]]]:
    """Return the bad words of at least two tokens, by the second-last one."""
    found: dict[int, list[list[int]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _ends_with(output: npt.NDArray[np.int32], tokens: list[int]) -> bool:
    return bool(output[-len(tokens) :].tolist() == tokens)


def _forbid(mask: Mask, token: int) -> None:
    mask.view(np.uint32)[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
