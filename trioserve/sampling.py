"""What a caller may ask of the sampler, and the one description of what the sampler does.

Order of operations
-------------------
For one row, with ``logits`` the model's output in float32, the worker applies, in this order:

1. *raw log-probabilities* are ``log_softmax(logits)``; they are what ``logprobs`` reports unless
   the engine runs with ``logprobs_mode="processed"``;
2. ``logit_bias`` is added;
3. ``repetition_penalty`` divides positive logits and multiplies negative ones, for every token that
   occurs in the prompt or the output; ``frequency_penalty`` times the count and
   ``presence_penalty`` times "occurs" are then subtracted, counting the output only;
4. while fewer than ``min_tokens`` tokens have been produced, every stop id is masked;
5. with ``temperature == 0`` the first largest logit wins, and what follows is skipped;
6. logits are divided by ``temperature``;
7. ``top_k`` keeps the k largest logits (ties with the k-th are kept);
8. ``top_p`` keeps the smallest set of the most probable tokens whose probability, renormalised
   after step 7, reaches p (always at least one);
9. ``min_p`` keeps tokens whose probability is at least ``min_p`` times that of the most probable
   one;
10. one token is drawn from what is left, renormalised; the *processed log-probabilities* are those
    of this last distribution (after step 4 for a greedy row).

The draw is an exponential race (what is also known as Gumbel-max): every candidate gets an
exponential random number divided by its probability, and the smallest wins. It is run twice,
between blocks of 128 consecutive token ids by the blocks' probabilities, and between the tokens of
the block that won. So another rounding of the logits changes the token only where two candidates
nearly tie; an inverse transform, one number looked up in a running sum, would shift with every
rounding before it.

The random numbers are Philox4x32-10's (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC'11), whose key is the seed and whose counter is (position, sequence index, purpose, lane):
the lane is the block's number, then the token's id. Nothing else enters, so a seeded request draws
with the same numbers whatever shares its batch and however often it was preempted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from trioserve.errors import InvalidRequest

__all__ = ["MAX_SEED", "SamplerParams", "SamplingParams"]

MAX_SEED = 2**63 - 1
MAX_COUNT = 2**31 - 1
"""The largest number of tokens that a message to the worker can carry."""
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARACTERS = 1024
MAX_LOGIT_BIAS = 1024


def _refuse(param: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{param} must be {wanted}, got {value!r}", param=param)


def _number(low: float, high: float, wanted: str) -> Any:
    def check(_: object, attribute: attrs.Attribute[float], value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(attribute.name, value, wanted)
        if not (math.isfinite(value) and low <= value <= high):
            raise _refuse(attribute.name, value, wanted)

    return check


def _integer(low: int, wanted: str, *, high: int = MAX_COUNT) -> Any:
    def check(_: object, attribute: attrs.Attribute[int], value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(attribute.name, value, wanted)
        if not low <= value <= high:
            raise _refuse(attribute.name, value, wanted)

    return check


def _boolean(_: object, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute.name, value, "true or false")


def _positive_number(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    _number(0.0, math.inf, "a number above 0")(_, attribute, value)
    if value == 0:
        raise _refuse(attribute.name, value, "a number above 0")


def _as_stop(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise _refuse("stop", value, "a string or a list of strings")
    stops = (value,) if isinstance(value, str) else tuple(value)
    for stop in stops:
        if not isinstance(stop, str):
            raise _refuse("stop", stop, "a string or a list of strings")
    return tuple(stop for stop in stops if stop)


def _check_stop(_: object, __: object, value: tuple[str, ...]) -> None:
    if len(value) > MAX_STOP_STRINGS:
        raise _refuse("stop", f"{len(value)} strings", f"at most {MAX_STOP_STRINGS} strings")
    for stop in value:
        if len(stop) > MAX_STOP_STRING_CHARACTERS:
            wanted = f"strings of at most {MAX_STOP_STRING_CHARACTERS} characters"
            raise _refuse("stop", f"{len(stop)} characters", wanted)


def _as_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    if value is not None and not isinstance(value, Iterable):
        raise _refuse("stop_token_ids", value, "a list of token ids")
    ids = () if value is None else tuple(value)
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise _refuse("stop_token_ids", item, "a list of token ids")
    return ids


def _as_bias(value: Mapping[Any, float] | None) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", value, "a map of token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise _refuse("logit_bias", f"{len(value)} entries", f"at most {MAX_LOGIT_BIAS} entries")
    bias: dict[int, float] = {}
    for key, number in value.items():
        try:
            token = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            raise _refuse("logit_bias", key, "a map whose keys are token ids") from None
        if (
            isinstance(number, bool)
            or not isinstance(number, (int, float))
            or not -100 <= number <= 100
        ):
            raise _refuse("logit_bias", number, "a map whose values are from -100 to 100")
        if token < 0:
            raise _refuse("logit_bias", key, "a map whose keys are token ids")
        bias[token] = float(number)
    return bias


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one request is to be sampled and when it ends; see the module's text for the order.

    Raises:
        InvalidRequest: a field is out of its range; ``param`` names it.
    """

    max_tokens: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_integer(1, "an integer of at least 1")),
    )
    min_tokens: int = attrs.field(default=0, validator=_integer(0, "an integer of at least 0"))
    temperature: float = attrs.field(
        default=1.0, validator=_number(0.0, 100.0, "a number from 0 to 100")
    )
    top_k: int = attrs.field(
        default=0, validator=_integer(-1, "an integer of at least 1, or 0 or -1 for off")
    )
    top_p: float = attrs.field(default=1.0, validator=_number(0.0, 1.0, "a number from 0 to 1"))
    min_p: float = attrs.field(default=0.0, validator=_number(0.0, 1.0, "a number from 0 to 1"))
    repetition_penalty: float = attrs.field(default=1.0, validator=_positive_number)
    frequency_penalty: float = attrs.field(
        default=0.0, validator=_number(-2.0, 2.0, "a number from -2 to 2")
    )
    presence_penalty: float = attrs.field(
        default=0.0, validator=_number(-2.0, 2.0, "a number from -2 to 2")
    )
    logit_bias: dict[int, float] = attrs.field(factory=dict, converter=_as_bias)
    seed: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            _integer(-(2**63), "an integer that fits 64 bits", high=MAX_SEED)
        ),
    )
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_stop, validator=_check_stop)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_ids)
    include_stop_str_in_output: bool = attrs.field(default=False, validator=_boolean)
    ignore_eos: bool = attrs.field(default=False, validator=_boolean)
    skip_special_tokens: bool = attrs.field(default=True, validator=_boolean)
    logprobs: int | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_integer(0, "an integer of at least 0")),
    )
    """None for no log-probabilities; n for the chosen token's and those of the n most probable."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.top_p == 0.0:
            raise _refuse("top_p", self.top_p, "a number above 0 and up to 1")


@attrs.frozen(kw_only=True)
class SamplerParams:
    """What the worker needs of a :class:`SamplingParams`, with nothing left to be looked up.

    ``stop_ids`` already holds the model's end-of-sequence ids unless they are ignored. ``seed`` is
    in 0 to 2**64 - 1. ``logprobs`` is -1 for none. ``sequence_index`` enters the random counter.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = attrs.field(factory=dict)
    stop_ids: list[int] = attrs.field(factory=list)
    seed: int = 0
    sequence_index: int = 0
    logprobs: int = -1

    def is_stop(self, token: int, num_output: int) -> bool:
        """Whether ``token``, the ``num_output``-th of the output (from 1), ends the sequence."""
        return num_output >= max(self.min_tokens, 1) and token in self.stop_ids
