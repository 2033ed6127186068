"""Check a :class:`~trioserve.protocol.wire.StepResult` against the plan that it answers."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.protocol.sampling import NAN_LOGITS, SamplingParams
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.request import Sequence, State
from trioserve.requests.stream import TokenLogprob
from trioserve.scheduler.beam_search import Continuations
from trioserve.scheduler.plan_builder import InFlight
from trioserve.scheduler.tensor_pieces import check_tensors
from trioserve.scheduler.token_counts import Ints


@attrs.frozen(eq=False)
class Results:
    """The ragged columns of one result: row i gave ``tokens[offsets[i]:offsets[i + 1]]``."""

    offsets: Ints
    tokens: Ints
    pieces: list[tuple[PromptLogprobs, wire.PromptPiece]]
    """Log-probabilities of prompts, and the records that collect them."""
    vectors: dict[int, bytes]
    """Pooled vector of a prompt, by slot."""
    tensors: list[tuple[Sequence, wire.TensorPiece]]
    """Rows of output tensors, and the sequences that gave them."""
    drafted: Ints | None
    """Draft tokens that each row verified; None if none did."""
    _message: wire.StepResult

    @classmethod
    def read(cls, message: wire.StepResult, plan: InFlight, vocab_size: int) -> Results:
        """Return the rows of ``message``, which must be those of ``plan``.

        Raises:
            WorkerLost: The message doesn't answer the plan.
        """
        if message.number != plan.number:
            raise WorkerLost(f"result of plan {message.number} came instead of {plan.number}")
        expected = wire.from_ints(plan.slots), wire.from_ints(plan.generations)
        if (message.slots, message.generations) != expected:
            raise WorkerLost(f"the rows of result {message.number} aren't those of its plan")
        try:
            return cls._read_columns(message, plan, vocab_size)
        except ValueError as error:
            raise WorkerLost(f"result {message.number} is damaged: {error}") from error

    @classmethod
    def _read_columns(cls, message: wire.StepResult, plan: InFlight, vocab_size: int) -> Results:
        offsets = wire.ints(message.offsets).astype(np.int64)
        tokens = wire.ints(message.tokens).astype(np.int64)
        if len(offsets) != len(plan.slots) + 1 or not _are_offsets(offsets, len(tokens)):
            raise WorkerLost(f"the offsets of result {message.number} fit neither rows nor tokens")
        if len(tokens) and not (tokens.min() >= NAN_LOGITS and tokens.max() < vocab_size):
            raise ValueError("a token is none of the vocabulary")
        if len(tokens) and tokens.min() < 0:
            none = (tokens < 0).nonzero()[0]
            if not np.isin(none + 1, offsets[1:]).all():
                raise ValueError("a token comes after one that there was none to draw for")
        given = offsets[1:] - offsets[:-1]
        is_wrong = given != plan.samples
        if plan.limits is not None:
            is_wrong &= (given < 1) | (given > plan.limits) | ~plan.samples
        for index in is_wrong.nonzero()[0].tolist():
            seq_state = plan.seq_states[index]
            # A sequence that has ended meanwhile may or may not have been computed once more.
            if seq_state.sequence.state is not State.FINISHED:
                raise WorkerLost(
                    f"result {message.number} has {given[index]} tokens for slot "
                    f"{seq_state.slot}, where {_due(plan, index)} due"
                )
        wants_logprobs = False
        for index in (plan.wants_more & (given > 0)).nonzero()[0].tolist():
            params = plan.seq_states[index].sequence.request.params
            wants_logprobs |= params.beam_width > 0
            if params.logprobs is not None:
                wants_logprobs = True
                if params.logprob_token_ids:
                    for at in range(int(offsets[index]), int(offsets[index + 1])):
                        if tokens[at] >= 0:
                            _check_asked(message, at, len(params.logprob_token_ids))
        if wants_logprobs:
            _check_logprobs(message, len(tokens), vocab_size)
        pieces = _check_pieces(message, plan, vocab_size) if plan.pieces or message.prompts else []
        vectors = _check_vectors(message, plan)
        tensors = check_tensors(message, plan)
        drafted = _check_drafted(message, plan) if message.drafted else None
        return cls(offsets, tokens, pieces, vectors, tensors, drafted, message)

    def row(self, index: int) -> list[int]:
        """Return the tokens that row ``index`` gave."""
        tokens: list[int] = self.tokens[self.offsets[index] : self.offsets[index + 1]].tolist()
        return tokens

    def continuations(self, row: int, params: SamplingParams) -> Continuations:
        """Return the most probable next tokens of row ``row``, a beam; none if it drew no token."""
        index, message = int(self.offsets[row]), self._message
        if not message.top_offsets:
            return Continuations(np.empty(0, np.int32), np.empty(0, np.float32))
        start, stop = wire.ints(message.top_offsets)[index : index + 2].tolist()
        asked = self.logprob(index, params).asked if params.logprob_token_ids else ()
        tokens, logprobs = wire.ints(message.top_ids), wire.floats(message.top_logprobs)
        return Continuations(tokens[start:stop], logprobs[start:stop], asked)

    def logprob(self, index: int, params: SamplingParams) -> TokenLogprob:
        """Return the log-probabilities that ``params`` asks for at ``index``, without text."""
        message = self._message
        num_top = params.logprobs
        top: tuple[tuple[int, float, str], ...] = ()
        if num_top and message.top_offsets:
            start, stop = wire.ints(message.top_offsets)[index : index + 2].tolist()
            stop = min(stop, start + num_top)
            ids = wire.ints(message.top_ids)[start:stop].tolist()
            logprobs = wire.floats(message.top_logprobs)[start:stop].tolist()
            top = tuple((token, logprob, "") for token, logprob in zip(ids, logprobs, strict=True))
        asked: tuple[tuple[int, float, str], ...] = ()
        if params.logprob_token_ids:
            start = int(wire.ints(message.ids_offsets)[index])
            column = wire.floats(message.ids_logprobs)[
                start : start + len(params.logprob_token_ids)
            ]
            named = zip(params.logprob_token_ids, column.tolist(), strict=True)
            asked = tuple((token, logprob, "") for token, logprob in named)
        logprob = float(wire.floats(message.logprobs)[index])
        return TokenLogprob(int(self.tokens[index]), logprob, "", top, asked)


def _check_drafted(message: wire.StepResult, plan: InFlight) -> Ints:
    """Return how many drafts each row verified; demand no more than the plan allows."""
    drafted = wire.ints(message.drafted).astype(np.int64)
    allowed = np.zeros(len(plan.slots)) if plan.limits is None else plan.limits - 1
    if len(drafted) != len(allowed) or (drafted < 0).any() or (drafted > allowed).any():
        raise ValueError("its numbers of drafts fit no plan")
    return drafted


def _due(plan: InFlight, index: int) -> str:
    if plan.samples[index] and plan.limits is not None and plan.limits[index] > 1:
        return f"1 to {plan.limits[index]} were"
    return f"{int(plan.samples[index])} was"


def _are_offsets(offsets: Ints, total: int) -> bool:
    """Return True if ``offsets`` cut ``total`` entries into pieces, some of them empty."""
    return bool(offsets[0] == 0 and offsets[-1] == total and (offsets[1:] >= offsets[:-1]).all())


def _check_logprobs(message: wire.StepResult, num_tokens: int, vocab_size: int) -> None:
    """Demand a log-probability for each token, and alternatives that can be told apart."""
    if len(wire.floats(message.logprobs)) != num_tokens:
        raise ValueError("its tokens come without their log-probabilities")
    if message.top_offsets:
        ids = wire.ints(message.top_ids)
        offsets = wire.ints(message.top_offsets).astype(np.int64)
        if len(offsets) != num_tokens + 1 or not _are_offsets(offsets, len(ids)):
            raise ValueError("its alternatives fit no tokens")
        if len(wire.floats(message.top_logprobs)) != len(ids):
            raise ValueError("its alternatives come without their log-probabilities")
        _check_ids(ids, vocab_size)


def _check_ids(ids: npt.NDArray[np.int32], vocab_size: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise ValueError("an alternative is none of the vocabulary")


def _check_asked(message: wire.StepResult, index: int, due: int) -> None:
    """Demand that token ``index`` comes with the log-probabilities of ``due`` other tokens."""
    start, stop = [*wire.ints(message.ids_offsets)[index : index + 2].tolist(), 0, 0][:2]
    if start < 0 or stop - start != due or stop > len(wire.floats(message.ids_logprobs)):
        raise WorkerLost(
            f"token {index} of result {message.number} comes without the log-probabilities "
            f"of the {due} tokens that were named"
        )


def _check_vectors(message: wire.StepResult, plan: InFlight) -> dict[int, bytes]:
    """Return the vectors of ``message`` by slot, one for each complete prompt that wants one.

    The vector of a sequence that has ended meanwhile may be missing.
    """
    vectors = {each.slot: each.vector for each in message.pooled}
    if not all(vector and len(vector) % 4 == 0 for vector in vectors.values()):
        raise WorkerLost(f"result {message.number} has a vector that is none")
    for index in (plan.wants_more & plan.samples).nonzero()[0].tolist():
        seq_state = plan.seq_states[index]
        sequence = seq_state.sequence
        is_due = sequence.sampler.pooling and sequence.state is not State.FINISHED
        if is_due and seq_state.slot not in vectors:
            raise WorkerLost(
                f"result {message.number} lacks the vector of the prompt in slot {seq_state.slot}"
            )
    return vectors


def _check_pieces(
    message: wire.StepResult, plan: InFlight, vocab_size: int
) -> list[tuple[PromptLogprobs, wire.PromptPiece]]:
    """Return the pieces of ``message`` that are due, with their collecting records.

    The pieces of a sequence that has ended meanwhile may be missing.
    """
    given = {piece.slot: piece for piece in message.prompts}
    if len(given) != len(message.prompts) or not given.keys() <= plan.pieces.keys():
        raise WorkerLost(f"result {message.number} has log-probabilities of prompts not asked for")
    pieces: list[tuple[PromptLogprobs, wire.PromptPiece]] = []
    for slot, due in plan.pieces.items():
        piece = given.get(slot)
        if piece is not None:
            try:
                due.logprobs.check(piece, due.start, due.stop)
                _check_ids(wire.ints(piece.top_ids), vocab_size)
            except ValueError as error:
                raise WorkerLost(
                    f"a prompt's log-probabilities in result {message.number} are wrong: {error}"
                ) from error
            pieces.append((due.logprobs, piece))
        elif due.sequence.state is not State.FINISHED:
            raise WorkerLost(
                f"result {message.number} lacks the log-probabilities of prompt tokens "
                f"{due.start} to {due.stop} in slot {slot}"
            )
    return pieces
