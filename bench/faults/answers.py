"""Whether a disturbed answer is the undisturbed one, up to near-ties of rounding.

What is computed again in another batch rounds differently. Where two tokens are all but equally
good, that may turn the choice, and everything after it is another text. So two answers are compared
up to their first difference, and that is looked into: it is a near-tie if a change of the logits by
no more than ``MARGIN`` makes the sampler itself choose the one token or the other. Anything beyond
is a real difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.sampling.truncation import BLOCK
from trioserve.protocol.sampling import SamplerParams

MARGIN = 1e-3
"""Of logits. Float32 sums of another order differ by 1e-5 or so at this size of model."""


@attrs.frozen(kw_only=True)
class Difference:
    """The first place where two answers of one request part."""

    position: int
    """In the output, from 0."""
    expected: int
    given: int


def first_difference(expected: Sequence[int], given: Sequence[int]) -> Difference | None:
    """Where ``given`` leaves ``expected``; None if they are equal.

    A token that one of them lacks is -1.
    """
    for position in range(max(len(expected), len(given))):
        one = expected[position] if position < len(expected) else -1
        other = given[position] if position < len(given) else -1
        if one != other:
            return Difference(position=position, expected=one, given=other)
    return None


def is_near_tie(
    logits: torch.Tensor, params: SamplerParams, tokens: Sequence[int], difference: Difference
) -> bool:
    """Whether ``MARGIN`` decides between the two tokens of ``difference``.

    Args:
        logits: [vocab_size], or log-probabilities, which are logits, too.
        params: what the request asked for.
        tokens: the prompt and the output up to the difference.
    """
    if -1 in (difference.expected, difference.given):
        return False
    drawn = {
        _draw(_tilted(logits, difference.given, difference.expected), params, tokens),
        _draw(_tilted(logits, difference.expected, difference.given), params, tokens),
    }
    return drawn == {difference.expected, difference.given}


def _tilted(logits: torch.Tensor, towards: int, away: int) -> torch.Tensor:
    """``logits`` moved by ``MARGIN`` in favor of a token, and of its block of the vocabulary, which
    the sampler draws first."""
    tilted = logits.clone()
    for token, change in ((away, -MARGIN), (towards, MARGIN)):
        first = token // BLOCK * BLOCK
        if towards // BLOCK != away // BLOCK:
            tilted[first : first + BLOCK] += change
        else:
            tilted[token] += change
    return tilted


def _draw(logits: torch.Tensor, params: SamplerParams, tokens: Sequence[int]) -> int:
    sampler = Sampler(len(logits), "cpu")
    row = SamplerRow(params, list(tokens), len(tokens))
    return int(sampler.sample(logits[None].clone(), [row]).tokens[0])
