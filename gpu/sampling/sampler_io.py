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
    """The input of a sampler for one sequence, which gets one token.

    ``tokens`` are prompt and output so far, of which the first ``prompt_length`` are the prompt; a
    NumPy array is fastest. The new token's position is ``len(tokens)``.
    """

    params: SamplerParams
    tokens: Sequence[int] | npt.NDArray[np.integer]
    prompt_length: int


def is_plainly_greedy(params: SamplerParams) -> bool:
    """Return whether each token is the argmax of the unmodified logits, and no more is wanted."""
    return (
        params.temperature <= 0
        and not params.generation_logits
        and params.logprobs < 0
        and not params.logit_bias
        and params.repetition_penalty == 1
        and not params.frequency_penalty
        and not params.presence_penalty
        and not (params.stop_ids and params.min_tokens > 0)
    )
