"""One turn of a session: its start in the history, its limits, and its addition to the history."""

from __future__ import annotations

import contextlib
import uuid
from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from trioserve.engine.sessions.turn_tree import SessionTurn
from trioserve.protocol.errors import InvalidRequest, RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import GenerationStream, PromptLike, as_prompt
from trioserve.requests.prompts import Prompt, TextPrompt, TokensPrompt

Generation = contextlib.AbstractAsyncContextManager[GenerationStream]


class Generate(Protocol):
    """:meth:`trioserve.Engine.generate`."""

    def __call__(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Generation: ...


@attrs.frozen(kw_only=True)
class Continuation:
    """The point of the history from which a turn goes on.

    Args:
        after: the id of a turn; None for the last one.
        anew: begin with an empty history, without forgetting anything.
        offset: keep only so many tokens of the history; negative ones count from its end.
        replace: once this turn has ended, forget all others that went on from the same one. Without
            ``after``, forget everything, and begin with an empty history.
        drop_previous_output: leave out the output of the turn before.
    """

    after: str | None = None
    anew: bool = False
    offset: int | None = None
    replace: bool = False
    drop_previous_output: bool = False


AFTER_THE_LAST = Continuation()
"""Go on from the last turn, whichever that is."""


@attrs.frozen(eq=False)
class Beginning:
    """The decisions made when a turn begins."""

    id: str
    parent: SessionTurn | None
    prefix: list[int]
    """The tokens of the history from which the turn goes on."""
    replace: bool


@attrs.frozen(kw_only=True)
class Said:
    """The addition of an ended turn to the history."""

    own: array[int]
    """The tokens of its prompt and its output."""
    num_prompt_tokens: int
    """The number of those that belong to the prompt."""
    salt: str
    adapter: int

    @classmethod
    def of(cls, stream: GenerationStream, cut: int, output_ids: Sequence[int]) -> Said:
        """Return the addition of the turn of ``stream``, which goes on from ``cut`` tokens."""
        prompt = stream.prompt_token_ids
        return cls(
            own=array("i", [*prompt[cut:], *output_ids]),
            num_prompt_tokens=len(prompt) - cut,
            salt=stream.request.cache_salt,
            adapter=stream.request.adapter,
        )


def new_turn_id() -> str:
    """Return an id for a turn that brings none."""
    return f"req-{uuid.uuid4().hex}"


def session_closed() -> RequestAborted:
    """Return the error that ends the turns of a closed session."""
    return RequestAborted("the session was closed")


def check_turn_sampling(params: SamplingParams | None, options: dict[str, Any]) -> None:
    """Refuse sampling parameters that no turn can have.

    Raises:
        InvalidRequest: there would be several outputs, or a prompt that is cut.
    """
    n = options.get("n", 1) if params is None else params.n
    if n not in (None, 1):
        raise InvalidRequest(f"n must be 1 in a session, got {n}", param="n")
    if params is None:
        truncate = options.get("truncate_prompt_tokens")
    else:
        truncate = params.truncate_prompt_tokens
    if truncate is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens isn't served in a session; see offset",
            param="truncate_prompt_tokens",
        )


def turn_prompt(prompt: PromptLike, prefix: Sequence[int]) -> Prompt:
    """Return a turn's prompt behind ``prefix``. Only a first turn gets special tokens before it.

    Raises:
        InvalidRequest: it is neither text nor token ids.
    """
    own = as_prompt(prompt)
    if not isinstance(own, TextPrompt | TokensPrompt):
        raise InvalidRequest("a turn's prompt is text or token ids", param="prompt")
    if isinstance(own, TextPrompt) and prefix:
        return attrs.evolve(own, add_special_tokens=False)
    return own
