"""Beam search: the choice of beams from the continuations of each step, without I/O.

A *beam* is a beginning of an output; its score is the sum of its tokens' processed
log-probabilities (:mod:`trioserve.protocol.sampling`). In each step every beam gives its most
probable continuations. Of all of them together:

- the best ``width`` that don't end become the next beams;
- those among the best ``width`` that end become *complete*. Their scores are divided by
  ``length ** length_penalty``, with the length of the output in tokens, and the best ``width`` of
  all complete outputs are kept.

The search is over when no beam is left, or as :class:`~trioserve.protocol.sampling.SamplingParams`
says of ``early_stopping``. These are the rules of ``generate`` in Hugging Face's transformers 5,
with sums in float32 as there. Equal scores are ordered by beam, then by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.protocol.token_ids import count_ids
from trioserve.requests.request import Finish
from trioserve.requests.stream import TokenLogprob

MAX_CONTINUATIONS = 64
"""The most continuations that a beam gives in a step."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
T = TypeVar("T")


def num_continuations(params: SamplingParams, sampler: SamplerParams) -> int:
    """Return the number of continuations of each beam that the next choice needs.

    They are enough for ``width`` beams even if all stop ids are among them, and a token that
    completes each stop string.
    """
    num_ends = count_ids(sampler.stop_ids) + len(params.stop)
    return params.beam_width + max(params.beam_width, num_ends)


@attrs.frozen(eq=False)
class Continuations:
    """The most probable next tokens of a beam: C ids and log-probabilities, in any order."""

    tokens: Ints
    logprobs: Floats
    asked: tuple[tuple[int, float, str], ...] = ()
    """Log-probabilities of the tokens that the request names."""

    def entry(self, place: int, num_top: int) -> TokenLogprob:
        """Return the log-probability of the token at ``place``, and the ``num_top`` highest."""
        pairs = zip(self.tokens[:num_top].tolist(), self.logprobs[:num_top].tolist(), strict=True)
        top = tuple((token, logprob, "") for token, logprob in pairs)
        logprob = float(self.logprobs[place])
        return TokenLogprob(int(self.tokens[place]), logprob, "", top, self.asked)


@attrs.frozen(eq=False)
class Beam:
    """A beginning of an output."""

    tokens: list[int] = attrs.field(factory=list)
    score: np.float32 = attrs.field(default=np.float32(0))
    """Sum of the tokens' log-probabilities."""
    entries: tuple[TokenLogprob, ...] = ()
    """The tokens' log-probabilities; empty where the request doesn't ask for them."""
    parent: int = 0
    """Place, among the beams before the last choice, of the beam that this one continues."""


@attrs.frozen(eq=False)
class CompleteBeam:
    """An output that a beam search has found."""

    beam: Beam
    score: np.float32
    """The beam's score divided by the length penalty."""
    finish: Finish


Ending = Callable[[list[int]], Finish | None]
"""Function that returns the end of an output if its last token ends it, else None."""


@attrs.define(eq=False, kw_only=True)
class BeamSearch:
    """The beams of one request.

    Args:
        params: The request's parameters.
        max_tokens: The most tokens of an output.
        ending: Returns the end of an output.
    """

    params: SamplingParams
    max_tokens: int
    ending: Ending
    beams: list[Beam] = attrs.field(init=False, factory=lambda: [Beam()])
    """The best first."""
    complete: list[CompleteBeam] = attrs.field(init=False, factory=list)
    """The best ``width`` complete outputs, the best first."""
    is_over: bool = attrs.field(init=False, default=False)

    def choose(self, found: Sequence[Continuations]) -> None:
        """Choose the next beams, given the continuations of each beam."""
        width, length = self.params.beam_width, len(self.beams[0].tokens) + 1
        scores = np.concatenate(
            [beam.score + each.logprobs for beam, each in zip(self.beams, found, strict=True)]
        )
        tokens = np.concatenate([each.tokens for each in found])
        counts = [len(each.tokens) for each in found]
        parents = np.repeat(np.arange(len(found)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.lexsort((tokens, parents, -scores))
        beams: list[Beam] = []
        complete: list[CompleteBeam] = []
        for rank, at in enumerate(order.tolist()):
            if len(beams) == width:
                break
            parent, place = int(parents[at]), int(places[at])
            output = [*self.beams[parent].tokens, int(tokens[at])]
            finish = self.ending(output)
            if finish is not None and rank >= width:
                continue
            entries = self._entries(parent, found[parent], place)
            beam = Beam(output, scores[at], entries, parent)
            if finish is None:
                beams.append(beam)
            else:
                score = scores[at] / np.float32(length**self.params.length_penalty)
                complete.append(CompleteBeam(beam, score, finish))
        self.beams = beams
        self.complete = sorted([*self.complete, *complete], key=lambda each: -each.score)[:width]
        self.is_over = not beams or self._is_good_enough(length)

    def _entries(self, parent: int, found: Continuations, place: int) -> tuple[TokenLogprob, ...]:
        num_top = self.params.logprobs
        if num_top is None:
            return ()
        return (*self.beams[parent].entries, found.entry(place, num_top))

    def _is_good_enough(self, length: int) -> bool:
        """Return True if the complete outputs end the search."""
        if len(self.complete) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        penalty = self.params.length_penalty
        if self.params.early_stopping == "never" and penalty > 0:
            length = self.max_tokens
        return bool(self.beams[0].score / np.float32(length**penalty) <= self.complete[-1].score)


def inherit(beams: Sequence[Beam], holders: Sequence[T]) -> tuple[dict[int, T], list[int]]:
    """Divide the holders of the beams before the last choice among those after it.

    Args:
        beams: The beams after the choice.
        holders: The holder of each beam before it.

    Returns:
        The holder of each beam that continues its parent's in place, by the beam's place, and the
        places of the other beams: a better one continues the same parent.
    """
    continued: dict[int, T] = {}
    forked: list[int] = []
    taken: set[int] = set()
    for place, beam in enumerate(beams):
        if beam.parent in taken:
            forked.append(place)
        else:
            taken.add(beam.parent)
            continued[place] = holders[beam.parent]
    return continued, forked
