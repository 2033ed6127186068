"""Reading a worker's :class:`~trioserve.wire.StepResult` against the plan that it answers."""

from __future__ import annotations

import itertools

import attrs

from trioserve import wire
from trioserve.errors import WorkerLost
from trioserve.logprobs import PromptLogprobs
from trioserve.request import State
from trioserve.sampling import SamplingParams
from trioserve.scheduler.draft import InFlight
from trioserve.stream import TokenLogprob

__all__ = ["Results"]


@attrs.frozen(eq=False)
class Results:
    """The ragged columns of one result, as lists: what row i gave is ``offsets[i:i + 2]``."""

    offsets: list[int]
    tokens: list[int]
    pieces: list[tuple[PromptLogprobs, wire.PromptPiece]]
    """Log-probabilities of prompts, and where they go."""
    _message: wire.StepResult

    @classmethod
    def read(cls, message: wire.StepResult, plan: InFlight) -> Results:
        """The rows of ``message``, which must be those of ``plan``.

        Raises:
            WorkerLost: they aren't; a worker that has lost count can't be trusted with anything.
        """
        if message.number != plan.number:
            raise WorkerLost(f"result of plan {message.number} came instead of {plan.number}")
        if (message.slots, message.generations) != (plan.slots, plan.generations):
            raise WorkerLost(f"the rows of result {message.number} aren't those of its plan")
        offsets, tokens = wire.ints(message.offsets).tolist(), wire.ints(message.tokens).tolist()
        rising = all(before <= after for before, after in itertools.pairwise(offsets))
        if len(offsets) != len(plan.rows) + 1 or not rising or offsets[-1] != len(tokens):
            raise WorkerLost(f"the offsets of result {message.number} fit neither rows nor tokens")
        for index, (computation, _, samples) in enumerate(plan.rows):
            given = offsets[index + 1] - offsets[index]
            # A sequence that has ended meanwhile may or may not have been computed once more.
            if given != samples and computation.sequence.state is not State.FINISHED:
                raise WorkerLost(
                    f"result {message.number} has {given} tokens for slot {computation.slot}, "
                    f"where {int(samples)} was due"
                )
            params = computation.sequence.request.params
            drawn = given and tokens[offsets[index]] >= 0
            if drawn and params.logprobs is not None and params.logprob_token_ids:
                _check_asked(message, offsets[index], len(params.logprob_token_ids))
        pieces = _check_pieces(message, plan) if plan.pieces or message.prompts else []
        return cls(offsets, tokens, pieces, message)

    def logprob(self, index: int, params: SamplingParams) -> TokenLogprob:
        """What ``params`` asks to know of token ``index``, without texts."""
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
        return TokenLogprob(self.tokens[index], logprob, "", top, asked)


def _check_asked(message: wire.StepResult, index: int, due: int) -> None:
    """Demand that token ``index`` comes with the log-probabilities of ``due`` other tokens."""
    start, stop = [*wire.ints(message.ids_offsets)[index : index + 2].tolist(), 0, 0][:2]
    if start < 0 or stop - start != due or stop > len(wire.floats(message.ids_logprobs)):
        raise WorkerLost(
            f"token {index} of result {message.number} comes without the log-probabilities "
            f"of the {due} tokens that were named"
        )


def _check_pieces(
    message: wire.StepResult, plan: InFlight
) -> list[tuple[PromptLogprobs, wire.PromptPiece]]:
    """The pieces of ``message`` with where they belong: those that are due, and no others.

    Of a sequence that has ended meanwhile they may be left out.
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
