"""The parts of a step's result besides its tokens: the reports that requests ask for.

Bulk fields are columns of :mod:`trioserve.protocol.wire`.
"""

from __future__ import annotations

import attrs

HIDDEN_STATES = "hidden_states"
CONTEXT_LOGITS = "context_logits"
GENERATION_LOGITS = "generation_logits"


@attrs.frozen(kw_only=True)
class PromptPiece:
    """The raw log-probabilities of the P prompt tokens that a row computed, from ``start`` on.

    ``logprobs`` is float32 [P], ``ranks`` int32 [P] (1 for the most probable token). With K of the
    slot's ``prompt_logprobs`` (or the whole vocabulary, if it is smaller) and M of its
    ``logprob_token_ids``: ``top_ids`` int32 and ``top_logprobs`` float32 [P, K], most probable
    first; ``ids_logprobs`` float32 [P, M].
    """

    slot: int
    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    ids_logprobs: bytes = b""


@attrs.frozen(kw_only=True)
class PooledPrompt:
    """The pooled hidden states of a slot's prompt: ``vector`` is float32 [E]."""

    slot: int
    vector: bytes


@attrs.frozen(kw_only=True)
class TensorPiece:
    """The rows of one tensor that a row of a plan gave, of the positions from ``start`` on.

    ``name`` is one of :data:`HIDDEN_STATES`, whose rows are the head's inputs, float32 [n, E];
    :data:`CONTEXT_LOGITS` and :data:`GENERATION_LOGITS`, whose rows are raw logits, float32 [n, V].
    The row of position p belongs to token p, and its logits are those of token p + 1. Logits of a
    generation are those that the token was drawn from.
    """

    slot: int
    name: str
    start: int
    rows: bytes
