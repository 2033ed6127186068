"""Sampling parameters, and the description of the sampler.

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
5. the logits processors' bias, computed from the raw logits, is added
   (:mod:`trioserve.protocol.logits_processors`), and then every token is masked that
   ``allowed_token_ids`` leaves out, that would complete one of ``bad_words``, or that the
   ``grammar`` doesn't allow next;
6. with ``temperature == 0`` the first largest logit wins, and what follows is skipped;
7. logits are divided by ``temperature``;
8. ``top_k`` keeps the k largest logits (ties with the k-th are kept);
9. ``top_p`` keeps the smallest set of the most probable tokens with a total probability of at
   least p, renormalised after step 8 (always at least one);
10. ``min_p`` keeps tokens that are at least ``min_p`` times as probable as the most probable one;
11. one token is drawn from what is left, renormalised; the *processed log-probabilities* are those
    of this last distribution (after step 5 for a greedy row).

If the masks leave no token, the sequence ends with an error. ``prompt_logprobs`` and
``logprob_token_ids`` always report raw log-probabilities.

The draw is an exponential race (also known as Gumbel-max): every candidate gets an exponential
random number divided by its probability, and the smallest wins. It is run twice, between blocks of
128 consecutive token ids by the blocks' probabilities, and between the tokens of the block that
won. So a different rounding of the logits changes the token only where two candidates nearly tie.
An inverse transform looks one number up in a running sum, so it would shift with every earlier
rounding.

The random numbers are Philox4x32-10's (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC'11). The key is the seed, and the counter is (position, sequence index, purpose, lane); the
lane is the block's number, then the token's id. Nothing else enters, so a seeded request draws with
the same numbers in every batch and after every preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trioserve.protocol.checks import (
    as_bias,
    as_id_set,
    as_ids,
    as_strings,
    boolean,
    integer,
    number,
    positive_number,
    refuse,
)
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.token_ids import as_column, has_id

MAX_SEED = 2**63 - 1
MAX_SEQUENCES = 128
"""The most outputs that one request may ask for."""
MAX_BEAM_WIDTH = 32
MAX_STOP_STRINGS = 64
MAX_STRING_CHARACTERS = 1024
MAX_BAD_WORDS = 256
MAX_LOGPROB_TOKEN_IDS = 128
MAX_EXTRA_ARGS = 64
MAX_PROCESSORS = 16

NO_TOKEN = -1
"""Number in place of a token if all logits are -inf. The request's masks are -inf, so they may hide
NaN.
"""
NAN_LOGITS = -2
"""Number in place of a token where logits that aren't masked hold NaN."""

_optional = attrs.validators.optional


def _as_stop(value: Any) -> tuple[str, ...]:
    return as_strings("stop", value, most=MAX_STOP_STRINGS, longest=MAX_STRING_CHARACTERS)


def _as_stop_regex(value: Any) -> tuple[str, ...]:
    return as_strings("stop_regex", value, most=MAX_STOP_STRINGS, longest=MAX_STRING_CHARACTERS)


def _as_bad_words(value: Any) -> tuple[str, ...]:
    return as_strings("bad_words", value, most=MAX_BAD_WORDS, longest=MAX_STRING_CHARACTERS)


def _as_stop_token_ids(value: Any) -> tuple[int, ...]:
    return as_id_set("stop_token_ids", value)


def _as_logprob_token_ids(value: Any) -> tuple[int, ...]:
    return as_ids("logprob_token_ids", value, most=MAX_LOGPROB_TOKEN_IDS)


def _as_returned_states(value: Any) -> str:
    """Convert to ``last``, ``all`` or, for none, an empty string."""
    if isinstance(value, bool):
        return "all" if value else ""
    if value not in ("", "last", "all"):
        raise refuse("return_hidden_states", value, 'true, false, "last" or "all"')
    return str(value)


def _as_allowed_token_ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else as_id_set("allowed_token_ids", value)


def _as_map(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert to a dict of JSON values by name."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refuse("extra_args", value, "a map of names to JSON values")
    if len(value) > MAX_EXTRA_ARGS:
        raise refuse("extra_args", f"{len(value)} entries", f"at most {MAX_EXTRA_ARGS} entries")
    return dict(value)


def _as_processors(value: Any) -> tuple[str, ...]:
    names = as_strings("logits_processors", value, most=MAX_PROCESSORS, longest=1024)
    for name in names:
        module, colon, class_name = name.partition(":")
        if not (module and colon and class_name):
            raise refuse("logits_processors", name, "classes as module:Class")
    return names


def _check_grammar(_: object, __: object, value: Grammar | None) -> None:
    if value is not None and not isinstance(value, Grammar):
        raise refuse("grammar", value, "a trioserve.Grammar")


def _check_prediction(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str):
        raise refuse(attribute.name, value, "a string")


def _check_early_stopping(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value != "never" and not isinstance(value, bool):
        raise refuse(attribute.name, value, 'true, false or "never"')


def _truncation(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    integer(-1, "a number of tokens of at least 1, or -1 for the model's context")(
        _, attribute, value
    )
    if value == 0:
        raise refuse(attribute.name, value, "at least 1, or -1 for the model's context")


GENERATION_CONFIG_FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Sampling parameters that a generation_config.json may hold, under these names."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """The sampling parameters and the end conditions of one request; the module's text has the
    order.

    Raises:
        InvalidRequest: a field is out of its range; ``param`` names it.
    """

    n: int = attrs.field(
        default=1,
        validator=integer(1, f"an integer from 1 to {MAX_SEQUENCES}", high=MAX_SEQUENCES),
    )
    """Number of outputs for the prompt, which is computed once."""
    beam_width: int = attrs.field(
        default=0,
        validator=integer(0, f"an integer from 0 to {MAX_BEAM_WIDTH}", high=MAX_BEAM_WIDTH),
    )
    """Number of beams of a beam search (:mod:`trioserve.scheduler.beam_search`), which returns the
    best ``n`` outputs. 0 samples.
    """
    length_penalty: float = attrs.field(
        default=1.0, validator=number(-100.0, 100.0, "a number from -100 to 100")
    )
    """Exponent of an output's length by which a beam search divides its log-probability."""
    early_stopping: bool | str = attrs.field(default=False, validator=_check_early_stopping)
    """The end of a beam search. True: when ``beam_width`` outputs are complete. False: when they
    are, and the best beam is worse than all of them at its present length. ``"never"``: when no
    beam can become better than one of them.
    """
    max_tokens: int | None = attrs.field(
        default=None, validator=_optional(integer(0, "an integer of at least 0"))
    )
    """The most output tokens; None for the engine's default. 0 computes the prompt alone, for its
    log-probabilities or to cache it.
    """
    min_tokens: int = attrs.field(default=0, validator=integer(0, "an integer of at least 0"))
    temperature: float = attrs.field(
        default=1.0, validator=number(0.0, 100.0, "a number from 0 to 100")
    )
    top_k: int = attrs.field(
        default=0, validator=integer(-1, "an integer of at least 1, or 0 or -1 for off")
    )
    top_p: float = attrs.field(default=1.0, validator=number(0.0, 1.0, "a number from 0 to 1"))
    min_p: float = attrs.field(default=0.0, validator=number(0.0, 1.0, "a number from 0 to 1"))
    repetition_penalty: float = attrs.field(default=1.0, validator=positive_number)
    frequency_penalty: float = attrs.field(
        default=0.0, validator=number(-2.0, 2.0, "a number from -2 to 2")
    )
    presence_penalty: float = attrs.field(
        default=0.0, validator=number(-2.0, 2.0, "a number from -2 to 2")
    )
    logit_bias: dict[int, float] = attrs.field(factory=dict, converter=as_bias)
    seed: int | None = attrs.field(
        default=None,
        validator=_optional(integer(-(2**63), "an integer that fits 64 bits", high=MAX_SEED)),
    )
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=_as_stop,
    )
    stop_regex: tuple[str, ...] = attrs.field(
        default=(),
        converter=_as_stop_regex,
    )
    """Regular expressions that end the output at their first match."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_as_stop_token_ids)
    include_stop_str_in_output: bool = attrs.field(default=False, validator=boolean)
    ignore_eos: bool = attrs.field(default=False, validator=boolean)
    skip_special_tokens: bool = attrs.field(default=True, validator=boolean)
    spaces_between_special_tokens: bool = attrs.field(default=True, validator=boolean)
    """True keeps a word-level tokenizer's spaces between special tokens. Other tokenizers put none
    there.
    """
    detokenize: bool = attrs.field(default=True, validator=boolean)
    """True for an output with text; False for token ids alone."""
    logprobs: int | None = attrs.field(
        default=None, validator=_optional(integer(0, "an integer of at least 0"))
    )
    """None for no log-probabilities; n for those of the chosen token and the n most probable
    tokens.
    """
    prompt_logprobs: int | None = attrs.field(
        default=None, validator=_optional(integer(0, "an integer of at least 0"))
    )
    """Like ``logprobs``, for the tokens of the prompt. The first token has none."""
    prompt_logprobs_start: int = attrs.field(
        default=0, validator=integer(0, "an integer of at least 0")
    )
    """The position of the first prompt token to report on."""
    logprob_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=_as_logprob_token_ids,
    )
    """Tokens to report the log-probabilities of at each position that reports any."""
    return_hidden_states: str = attrs.field(default="", converter=_as_returned_states)
    """Hidden states to return (:mod:`trioserve.requests.tensors`): ``last`` for those that tokens
    were drawn from, ``all`` or True for those of the prompt as well.
    """
    return_context_logits: bool = attrs.field(default=False, validator=boolean)
    """True to return the raw logits behind each token of the prompt."""
    return_generation_logits: bool = attrs.field(default=False, validator=boolean)
    """True to return the raw logits that each token was drawn from."""
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=_as_allowed_token_ids,
    )
    """The only tokens that may be drawn; None for all."""
    bad_words: tuple[str, ...] = attrs.field(
        default=(),
        converter=_as_bad_words,
    )
    """Words that are never completed: their last token is masked behind the others."""
    grammar: Grammar | None = attrs.field(default=None, validator=_check_grammar)
    extra_args: dict[str, Any] = attrs.field(factory=dict, converter=_as_map)
    """Parameters for logits processors, by name."""
    logits_processors: tuple[str, ...] = attrs.field(default=(), converter=_as_processors)
    """Classes ``module:Class`` for this request's logits, in addition to the server's. The worker
    imports them; no HTTP request can name one.
    """
    speculative: bool = attrs.field(default=True, validator=boolean)
    """False for an output without draft tokens, if the engine drafts any. The tokens are the same.
    """
    prediction: str = attrs.field(default="", validator=_check_prediction)
    """Text that the output is expected to repeat in part, such as a file to be changed. An engine
    that drafts tokens drafts from it; the output doesn't depend on it.
    """
    truncate_prompt_tokens: int | None = attrs.field(default=None, validator=_optional(_truncation))
    """The number of tokens to keep of a longer prompt; -1 for as many as the model's context
    leaves.
    """
    truncation_side: str = "left"
    """Side that a long prompt is cut on: ``left`` or ``right``."""

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if 0 < self.beam_width < self.n:
            raise refuse("n", self.n, f"at most beam_width ({self.beam_width})")
        if self.beam_width and self.stop_regex:
            raise refuse("stop_regex", list(self.stop_regex), "left out with beam_width")
        for name in self.returned_tensors if self.beam_width else ():
            raise refuse(name, getattr(self, name), "left out with beam_width")
        if self.top_p == 0.0:
            raise refuse("top_p", self.top_p, "a number above 0 and up to 1")
        if self.allowed_token_ids == ():
            raise refuse("allowed_token_ids", [], "a list of at least one token id")
        if self.grammar is not None and self.min_tokens:
            # The grammar may end the output before ``min_tokens`` tokens are there.
            raise refuse("min_tokens", self.min_tokens, "0 where the output follows a grammar")
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise refuse(name, list(getattr(self, name)), "left out without detokenize")
        if self.truncation_side not in ("left", "right"):
            raise refuse("truncation_side", self.truncation_side, '"left" or "right"')
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise refuse(
                "prompt_logprobs_start", self.prompt_logprobs_start, "0 without prompt_logprobs"
            )
        if self.logprob_token_ids and self.logprobs is None and self.prompt_logprobs is None:
            raise refuse(
                "logprob_token_ids",
                list(self.logprob_token_ids),
                "left out where no log-probabilities are asked for",
            )

    @property
    def returned_tensors(self) -> tuple[str, ...]:
        """The fields that ask for hidden states or logits."""
        names = ("return_hidden_states", "return_context_logits", "return_generation_logits")
        return tuple(name for name in names if getattr(self, name))


@attrs.frozen(kw_only=True)
class SamplerParams:
    """The worker's form of a :class:`SamplingParams`, with every default filled in.

    ``stop_ids`` already holds the model's end-of-sequence ids unless they are ignored; it and
    ``allowed_token_ids`` are columns of :mod:`trioserve.protocol.token_ids`. ``seed`` is in 0 to
    2**64 - 1. ``logprobs`` and ``prompt_logprobs`` are -1 for none; an empty ``allowed_token_ids``
    allows all; each of ``bad_words`` is a list of token ids. ``sequence_index`` enters the random
    counter.
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
    stop_ids: bytes = attrs.field(default=b"", converter=as_column)
    seed: int = 0
    sequence_index: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    logprob_token_ids: list[int] = attrs.field(factory=list)
    processed_logprobs: bool = False
    """True to report processed log-probabilities, whatever the engine's mode."""
    allowed_token_ids: bytes = attrs.field(default=b"", converter=as_column)
    bad_words: list[list[int]] = attrs.field(factory=list)
    grammar: Grammar | None = None
    extra_args: dict[str, Any] = attrs.field(factory=dict)
    logits_processors: list[str] = attrs.field(factory=list)
    speculative: bool = True
    """False for no draft tokens."""
    draft_scope: str = ""
    """Recent outputs of requests with the same scope are drafted from."""
    prediction: bytes = b""
    """Tokens that the output may repeat: an int32 column, in their order."""
    generation_logits: bool = False
    """True to return the logits that each token is drawn from."""
    pooling: str = ""
    """Pooling of the prompt's hidden states: ``last`` or ``mean``; empty for none."""

    def is_stop(self, token: int, num_output: int) -> bool:
        """Return True if ``token`` ends an output as its token number ``num_output``, from 1."""
        return num_output >= max(self.min_tokens, 1) and has_id(self.stop_ids, token)
