"""Embeddings by a generative model: prompts go through the scheduler, and no token is sampled.

They are computed in the same steps as generation. With the pooling ``last`` they may begin with
cached prefixes; a mean needs all hidden states, so such a prompt is computed whole.
"""

from __future__ import annotations

import typing
from collections.abc import Awaitable, Callable, Sequence

import attrs
import numpy as np

from trioserve._util.together import all_together
from trioserve.model_files.decoder_embedding import DecoderPooling
from trioserve.pooling.columns import Floats
from trioserve.pooling.inputs import Item
from trioserve.protocol import wire
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.deadline import Deadline
from trioserve.requests.options import RequestOptions
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt

POOLINGS: tuple[str, ...] = typing.get_args(DecoderPooling)


@attrs.frozen(kw_only=True)
class AskedPrompt:
    """A prompt to be pooled into a vector; ``pooling`` is one of :data:`POOLINGS`."""

    prompt: Prompt
    pooling: str
    params: SamplingParams
    options: RequestOptions


PoolPrompt = Callable[[AskedPrompt, Deadline], Awaitable[tuple[bytes, int]]]
"""Computes a prompt; returns its float32 vector and its number of tokens."""


def check_pooling(pooling: str) -> str:
    """Return ``pooling`` if it is known.

    Raises:
        InvalidRequest: It is not one of :data:`POOLINGS`.
    """
    if pooling not in POOLINGS:
        known = ", ".join(POOLINGS)
        raise InvalidRequest(f"pooling must be one of {known}; got {pooling!r}", param="pooling")
    return pooling


async def pool_prompts(
    items: Sequence[Item],
    pool_prompt: PoolPrompt,
    deadline: Deadline,
    options: RequestOptions,
    *,
    pooling: str,
    truncate: int | None,
) -> tuple[Floats, list[int]]:
    """Return the vectors [N, E] of N texts or lists of token ids, and the length of each.

    Raises:
        TrioserveError: The first failure; the other prompts are then aborted.
    """
    params = SamplingParams(
        max_tokens=0, temperature=0.0, truncate_prompt_tokens=truncate, truncation_side="right"
    )
    name = options.named()

    async def pool(index: int, item: Item) -> tuple[bytes, int]:
        own = attrs.evolve(
            options,
            request_id=name if len(items) == 1 else f"{name}-{index}",
            # The deadline is one for all prompts, and each is measured from when it is asked.
            timeout=None,
            arrived=None,
        )
        asked = AskedPrompt(prompt=_prompt_of(item), pooling=pooling, params=params, options=own)
        try:
            return await pool_prompt(asked, deadline)
        except InvalidRequest as error:
            error.param = "input" if error.param == "prompt" else error.param
            raise

    found = await all_together(pool, items)
    vectors = np.stack([wire.floats(vector) for vector, _ in found])
    return vectors, [count for _, count in found]


def _prompt_of(item: Item) -> Prompt:
    if isinstance(item, TokensPrompt):
        return item
    assert isinstance(item, str), "pairs have been refused"
    return TextPrompt(item)
