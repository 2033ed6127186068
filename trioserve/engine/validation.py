"""Checks of a request before it costs time, and the sampling parameters for the worker.

These checks need the model and the options. Checks of single fields are in
:mod:`trioserve.protocol.sampling`. A prompt's exact length is checked once it has been tokenized.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import attrs

from trioserve.config import EngineConfig
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.prompt_size import characters_of_contents
from trioserve.requests.prompts import Prompt, TokensPrompt, embeddings_in
from trioserve.scheduler.beam_search import MAX_CONTINUATIONS, num_continuations
from trioserve.text.stop_regex import check_stop_regex
from trioserve.text.tokenizer import Tokenizer


def check_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    vocab_size: int,
    keep: int | None = None,
) -> int:
    """Refuse a prompt that can't fit, or that has ids outside the vocabulary.

    With ``keep`` it is going to be cut to as many tokens.

    Returns:
        a lower bound of its tokens.

    Raises:
        ContextTooLong: it is certain to be longer than the model's context.
        InvalidRequest: an id is outside the vocabulary.
    """
    fewest = tokenizer.fewest_tokens(prompt)
    if keep is not None:
        fewest = min(fewest, keep)
    if fewest > max_model_len:
        # Refused before seconds are spent on encoding it.
        raise ContextTooLong(
            f"at least {fewest} tokens in the prompt: "
            f"this model's maximum context length is {max_model_len} tokens",
            param="prompt",
        )
    characters = characters_of_contents(prompt)
    if keep is None and characters > tokenizer.max_characters:
        raise ContextTooLong(
            f"the prompt has {characters} characters, and at most {tokenizer.max_characters} are "
            f"encoded: this model's maximum context length is {max_model_len} tokens",
            param="prompt",
        )
    if isinstance(prompt, TokensPrompt):
        _check_ids({"prompt": prompt.token_ids}, vocab_size)
    return fewest


def max_prompt_tokens(params: SamplingParams, max_model_len: int) -> int | None:
    """Return the number of tokens to which a longer prompt is cut; None to leave it as it is."""
    if params.truncate_prompt_tokens != -1:
        return params.truncate_prompt_tokens
    # A request for no tokens needs room for one as well.
    return max(max_model_len - max(params.max_tokens or 1, 1), 1)


def limit_output(params: SamplingParams, most: int | None) -> SamplingParams:
    """Return ``params`` with ``max_tokens`` lowered to ``most``, where that is a limit.

    Raises:
        InvalidRequest: more tokens than that are asked for at least.
    """
    if most is None:
        return params
    if params.min_tokens > most:
        raise InvalidRequest(
            f"min_tokens must be at most {most} (max_new_tokens of --override-generation-config "
            f"or --generation-config), got {params.min_tokens}",
            param="min_tokens",
        )
    if params.max_tokens is None or params.max_tokens <= most:
        return params
    return attrs.evolve(params, max_tokens=most)


def check_params(params: SamplingParams, config: EngineConfig, *, vocab_size: int) -> None:
    """Refuse parameters that this server isn't set up for.

    Raises:
        InvalidRequest: a field is past an option's bound, or a stop regex is no good; ``param``
            names it.
    """
    for name in ("logprobs", "prompt_logprobs"):
        asked: int | None = getattr(params, name)
        if asked is not None and asked > config.max_logprobs:
            raise InvalidRequest(
                f"{name} must be at most {config.max_logprobs} (--max-logprobs), got {asked}",
                param=name,
            )
    if params.n > config.max_num_queued_reqs:
        raise InvalidRequest(
            f"n must be at most {config.max_num_queued_reqs} (--max-num-queued-reqs), "
            f"got {params.n}",
            param="n",
        )
    check_stop_regex(params.stop_regex)
    if params.extra_args and not (config.logits_processors or params.logits_processors):
        raise InvalidRequest(
            "extra_args are for logits processors, and the server has none "
            f"(--logits-processors); got {', '.join(sorted(params.extra_args))}",
            param="extra_args",
        )
    named = {
        "logit_bias": params.logit_bias,
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logprob_token_ids": params.logprob_token_ids,
    }
    _check_ids(named, vocab_size)


def check_without_text(params: SamplingParams) -> None:
    """Refuse parameters that need text, for a server without a tokenizer.

    Raises:
        InvalidRequest: a field asks for it; ``param`` names it.
    """
    for name, instead in (
        ("stop", "give stop_token_ids"),
        ("stop_regex", "give stop_token_ids"),
        ("prediction", "leave it out"),
    ):
        if getattr(params, name):
            raise InvalidRequest(
                f"{name} needs text, and the server has no tokenizer (--skip-tokenizer-init): "
                f"{instead}",
                param=name,
            )


def check_prediction(prediction: str, tokenizer: Tokenizer) -> None:
    """Refuse a prediction that is longer than any output.

    Raises:
        InvalidRequest: it has more characters than the tokenizer encodes.
    """
    if len(prediction) > tokenizer.max_characters:
        raise InvalidRequest(
            f"prediction must have at most {tokenizer.max_characters} characters, "
            f"got {len(prediction)}",
            param="prediction",
        )


def check_embeddings(prompt: Prompt, params: SamplingParams, width: int) -> None:
    """Refuse embeddings that the worker doesn't take, and parameters that need a prompt's tokens.

    Raises:
        InvalidRequest: ``param`` names the field.
    """
    if not width:
        raise InvalidRequest(
            "embeddings in a prompt aren't served with this model or these options",
            param="prompt",
        )
    for each in embeddings_in(prompt):
        if each.width != width:
            raise InvalidRequest(
                f"embeddings must have the model's hidden size, {width} columns, got {each.width}",
                param="prompt",
            )
    why = "this one has embeddings"
    if not isinstance(prompt, SpeechPrompt):  # whose tokens are all there
        _refuse_reading(params, why)
    if params.truncate_prompt_tokens is not None:
        raise _needs_tokens("truncate_prompt_tokens", why)


def check_media(params: SamplingParams) -> None:
    """Refuse to truncate a prompt with media, of which a part would be left out.

    Raises:
        InvalidRequest: ``param`` names the field.
    """
    if params.truncate_prompt_tokens is not None:
        raise InvalidRequest(
            "truncate_prompt_tokens isn't served in a prompt with images, audio or videos",
            param="truncate_prompt_tokens",
        )


def check_prompt_adapter(name: str, params: SamplingParams) -> None:
    """Refuse parameters that need a prompt's tokens, with the prompt adapter of that name.

    Raises:
        InvalidRequest: ``param`` names the field.
    """
    _refuse_reading(params, f"the prompt adapter {name!r} puts embeddings in front of them")


def _refuse_reading(params: SamplingParams, why: str) -> None:
    """Refuse parameters that read all tokens of a prompt."""
    if params.prompt_logprobs is not None:
        raise _needs_tokens("prompt_logprobs", why)
    if params.repetition_penalty != 1.0:
        raise _needs_tokens("repetition_penalty", why)


def _needs_tokens(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} needs a prompt's tokens, and {why}: leave it out", param=name)


def _check_ids(named: Mapping[str, Collection[int]], vocab_size: int) -> None:
    for name, ids in named.items():
        most, least = max(ids, default=-1), min(ids, default=0)
        if most >= vocab_size or least < 0:
            wrong = least if least < 0 else most
            raise InvalidRequest(
                f"{name} holds a token id outside 0 to {vocab_size - 1}: {wrong}", param=name
            )


def sampler_params(
    params: SamplingParams,
    seed: int,
    eos_token_ids: Collection[int],
    tokenizer: Tokenizer,
    draft_scope: str = "",
) -> SamplerParams:
    """Return the worker's sampling parameters for the first of the request's sequences.

    Numbers of other types that count as such, like NumPy's, become Python's own: a message takes no
    others.

    Raises:
        InvalidRequest: one of ``bad_words`` can't be spelled in tokens.
    """
    eos = () if params.ignore_eos else eos_token_ids
    sampler = SamplerParams(
        temperature=float(params.temperature),
        top_k=int(max(params.top_k, 0)),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        frequency_penalty=float(params.frequency_penalty),
        presence_penalty=float(params.presence_penalty),
        min_tokens=int(params.min_tokens),
        logit_bias=params.logit_bias,
        stop_ids=(*eos, *params.stop_token_ids),
        seed=int(seed),
        logprobs=-1 if params.logprobs is None else int(params.logprobs),
        prompt_logprobs=-1 if params.prompt_logprobs is None else int(params.prompt_logprobs),
        logprob_token_ids=list(params.logprob_token_ids),
        allowed_token_ids=params.allowed_token_ids or (),
        bad_words=tokenizer.bad_word_ids(params.bad_words) if params.bad_words else [],
        grammar=params.grammar,
        extra_args=params.extra_args,
        logits_processors=list(params.logits_processors),
        # Each token of an output tensor's row comes with a step of its own.
        speculative=params.speculative and not params.returned_tensors,
        generation_logits=params.return_generation_logits,
        draft_scope=draft_scope,
    )
    return _for_beams(params, sampler) if params.beam_width else sampler


def _for_beams(params: SamplingParams, sampler: SamplerParams) -> SamplerParams:
    """Return ``sampler`` for rows that give the continuations of beams."""
    count = num_continuations(params, sampler)
    if count > MAX_CONTINUATIONS:
        most = MAX_CONTINUATIONS - params.beam_width
        raise InvalidRequest(
            f"a beam search of width {params.beam_width} takes at most {most} stop strings and "
            f"stop ids, the model's included, got {count - params.beam_width}",
            param="stop_token_ids",
        )
    return attrs.evolve(
        sampler,
        temperature=0.0,
        logprobs=max(count, sampler.logprobs),
        processed_logprobs=True,
        speculative=False,
    )
