"""Inputs and outputs of a sampler, shared by all samplers."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trioserve.protocol.sampling import SamplerParams

TopLogprobs = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Token ids and their log-probabilities, most probable first."""


@attrs.define
class SamplerRow:
    """One sequence that is to get one token.

    ``tokens`` is the prompt and the output so far, its first ``prompt_length`` tokens the prompt; a
    NumPy array is the cheapest. The new token's position is ``len(tokens)``.
    """

    params: SamplerParams
    tokens: Sequence[int] | npt.NDArray[np.integer]
    prompt_length: int


def is_plainly_greedy(params: SamplerParams) -> bool:
    """Return whether each draw is just the argmax of the model's own logits."""
    return (
        params.temperature <= 0
        and params.logprobs < 0
        and not params.logit_bias
        and params.repetition_penalty == 1
        and not params.frequency_penalty
        and not params.presence_penalty
        and not (params.stop_ids and params.min_tokens > 0)
    )
