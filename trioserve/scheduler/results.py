"""Reading a worker's :class:`~trioserve.wire.StepResult` against the plan that it answers."""

from __future__ import annotations

import itertools

import attrs

from trioserve import wire
from trioserve.errors import WorkerLost
from trioserve.request import State
from trioserve.scheduler.draft import InFlight
from trioserve.stream import TokenLogprob

__all__ = ["Results"]


@attrs.frozen(eq=False)
class Results:
    """The ragged columns of one result, as lists: what row i gave is ``offsets[i:i + 2]``."""

    offsets: list[int]
    tokens: list[int]
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
        return cls(offsets, tokens, message)

    def logprob(self, index: int, num_top: int) -> TokenLogprob:
        """The log-probability of token ``index`` with the ``num_top`` most probable, no texts."""
        message = self._message
        top: tuple[tuple[int, float, str], ...] = ()
        if num_top and message.top_offsets:
            start, stop = wire.ints(message.top_offsets)[index : index + 2].tolist()
            stop = min(stop, start + num_top)
            ids = wire.ints(message.top_ids)[start:stop].tolist()
            logprobs = wire.floats(message.top_logprobs)[start:stop].tolist()
            top = tuple((token, logprob, "") for token, logprob in zip(ids, logprobs, strict=True))
        logprob = float(wire.floats(message.logprobs)[index])
        return TokenLogprob(self.tokens[index], logprob, "", top)
