"""The reference: a client's expected outputs, from the model's function and the written rules.

It uses no code of the engine. It is slow and simple: each token is computed from the whole context,
and each stop string is searched for at every character.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Iterable
from typing import Any

import attrs
import numpy as np

from trioserve.protocol.sampling import SamplerParams
from trioserve.testing.fake_model import (
    adapter_shift,
    beam_logprobs,
    draw,
    fake_logprob,
    fake_logprobs,
)
from trioserve.testing.simulation.scenario import Scenario, SimulatedClient

NUM_TOKENS = 256
"""Size of the vocabulary: one token for each byte."""


@attrs.frozen(kw_only=True)
class ExpectedOutput:
    """The output of a request without faults."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """``stop`` or ``length``; ``error`` if the model had no token to sample."""
    stop_reason: int | str | None = None
    logprobs: tuple[float, ...] = ()
    asked: tuple[tuple[float, ...], ...] = ()


@functools.cache
def _bytes_of_tokens() -> tuple[int, ...]:
    """Return the byte of each token of :func:`trioserve.testing.fake_engine.byte_tokenizer`.

    Its vocabulary is GPT-2's alphabet in order: printable bytes stand for themselves, all others
    for the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return tuple(printable + [byte for byte in range(256) if byte not in printable])


@functools.cache
def _token_of_byte() -> dict[int, int]:
    return {byte: token for token, byte in enumerate(_bytes_of_tokens())}


@functools.lru_cache(maxsize=4096)
def ids_of(text: str) -> tuple[int, ...]:
    """Return the tokens of a text."""
    return tuple(_token_of_byte()[byte] for byte in text.encode())


def prompt_ids_of(client: SimulatedClient) -> list[int]:
    """Return the tokens of the prompt, truncated as the request asks."""
    prompt: Any = client.prompt
    if isinstance(prompt, str):
        ids = list(ids_of(prompt))
    elif isinstance(prompt[0], int):
        ids = list(prompt)
    else:
        lines = [f"{message['role']}: {message['content']}\n" for message in prompt]
        ids = list(ids_of("".join(lines) + "assistant:"))
    keep = client.params.get("truncate_prompt_tokens")
    if keep is None:
        return ids
    return ids[:keep] if client.params.get("truncation_side") == "right" else ids[-keep:]


def expected_outputs(
    scenario: Scenario, client: SimulatedClient, adapter: str = ""
) -> list[ExpectedOutput]:
    """Return the client's outputs with the adapter of folder ``adapter``, "" for none."""
    if client.beam_width and client.params["max_tokens"]:
        return _beams(scenario, client)
    return [_output(scenario, client, adapter, index) for index in range(client.num_outputs)]


def text_of(tokens: Iterable[int]) -> str:
    """Return the text of ``tokens``."""
    return bytes(map(_bytes_of_tokens().__getitem__, tokens)).decode("utf-8", "replace")


def _output(
    scenario: Scenario, client: SimulatedClient, adapter: str, index: int
) -> ExpectedOutput:
    params = client.params
    prompt = prompt_ids_of(client)
    stops, stop_ids = _stop_ids(scenario, client)
    sampler = _sampler(client, index)
    token_function = scenario.worker.token_function()
    min_tokens = params.get("min_tokens", 0)
    tokens: list[int] = []
    reason = "length"
    stop_reason: int | None = None
    while len(tokens) < params["max_tokens"]:
        token = draw(token_function, prompt + tokens, sampler)
        if token < 0:
            reason = "error"
            break
        if adapter:
            token = (token + adapter_shift(adapter)) % NUM_TOKENS
        tokens.append(token)
        if token in stop_ids and len(tokens) >= max(min_tokens, 1):
            reason = "stop"
            stop_reason = token if token in stops else None
            break
    return _finished(client, tokens, reason, stop_reason)


def _stop_ids(scenario: Scenario, client: SimulatedClient) -> tuple[set[int], set[int]]:
    """Return the client's own stop ids, and all that end its outputs."""
    stops = set(client.params.get("stop_token_ids", ()))
    is_endless = client.params.get("ignore_eos")
    return stops, stops if is_endless else stops | set(scenario.eos_token_ids)


def _sampler(client: SimulatedClient, index: int) -> SamplerParams:
    return SamplerParams(
        seed=client.params["seed"],
        sequence_index=index,
        allowed_token_ids=list(client.params.get("allowed_token_ids") or ()),
        processed_logprobs=client.beam_width > 0,
    )


def _finished(
    client: SimulatedClient, tokens: list[int], reason: str, stop_reason: int | None
) -> ExpectedOutput:
    """Return an output of all ``tokens`` up to its first stop string."""
    params, prompt = client.params, prompt_ids_of(client)
    num_tokens, text, found = _cut(tokens, reason, client)
    if found is not None:
        reason = "stop"
    tokens = tokens[:num_tokens]
    contexts = [prompt + tokens[:place] for place in range(num_tokens)]
    asked_ids = list(params.get("logprob_token_ids", ()))
    return ExpectedOutput(
        token_ids=tuple(tokens),
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason if found is None else found,
        logprobs=tuple(
            float(fake_logprobs(context, NUM_TOKENS)[token])
            if client.beam_width
            else fake_logprob(token, 0)
            for context, token in zip(contexts, tokens, strict=True)
        ),
        asked=tuple(
            tuple(fake_logprobs(context, NUM_TOKENS)[asked_ids].tolist()) for context in contexts
        )
        if asked_ids
        else (),
    )


def _beams(scenario: Scenario, client: SimulatedClient) -> list[ExpectedOutput]:
    """Return the outputs of a beam search, from all continuations of all beams in each step."""
    params, prompt = client.params, prompt_ids_of(client)
    width, penalty, limit = client.beam_width, params["length_penalty"], params["max_tokens"]
    stopping, sampler = params["early_stopping"], _sampler(client, 0)
    beams: list[tuple[list[int], np.float32]] = [([], np.float32(0))]
    done: list[tuple[np.float32, ExpectedOutput]] = []
    for length in range(1, limit + 1):
        every = []
        for place, (tokens, total) in enumerate(beams):
            logprobs = beam_logprobs(prompt + tokens, sampler, NUM_TOKENS)
            allowed = (logprobs > -np.inf).nonzero()[0].tolist()
            every += [(-(total + logprobs[token]), place, token) for token in allowed]
        goes_on: list[tuple[list[int], np.float32]] = []
        for rank, (negative, place, token) in enumerate(sorted(every)):
            tokens = [*beams[place][0], token]
            output = _ended(scenario, client, tokens)
            if output is None:
                goes_on.append((tokens, np.float32(-negative)))
            elif rank < width:
                done.append((np.float32(-negative) / np.float32(length**penalty), output))
        beams = goes_on[:width]
        done = sorted(done, key=lambda each: -each[0])[:width]
        if not beams:
            break
        if len(done) == width:
            at_most = limit if stopping == "never" and penalty > 0 else length
            reachable = beams[0][1] / np.float32(at_most**penalty)
            if stopping is True or reachable <= done[-1][0]:
                break
    outputs = [output for _, output in done[: client.num_outputs]]
    if len(outputs) < client.num_outputs:
        return [ExpectedOutput(token_ids=(), text="", finish_reason="error")] * client.num_outputs
    return outputs


def _ended(scenario: Scenario, client: SimulatedClient, tokens: list[int]) -> ExpectedOutput | None:
    """Return the output that a beam's last token ends; None if it goes on."""
    stops, stop_ids = _stop_ids(scenario, client)
    if tokens[-1] in stop_ids and len(tokens) >= max(client.params.get("min_tokens", 0), 1):
        return _finished(client, tokens, "stop", tokens[-1] if tokens[-1] in stops else None)
    _, _, found = _cut(tokens, "length", client)
    if found is not None or len(tokens) == client.params["max_tokens"]:
        return _finished(client, tokens, "length", None)
    return None


def _cut(tokens: list[int], reason: str, client: SimulatedClient) -> tuple[int, str, str | None]:
    """End an output at its first stop string.

    Returns:
        The number of its tokens, its text, and the stop string, None if there was none.
    """
    params = client.params
    stops: Iterable[str] = params.get("stop", ())
    include = params.get("include_stop_str_in_output", False)
    at_stop_id = reason == "stop"
    plain = tokens[:-1] if at_stop_id else tokens
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for place, token in enumerate([*plain, None]):
        if token is None and at_stop_id:
            break
        data = b"" if token is None else bytes([_bytes_of_tokens()[token]])
        num_tokens = min(place + 1, len(plain))
        for character in decoder.decode(data, final=token is None):
            text += character
            if num_tokens < params.get("min_tokens", 0):
                continue
            found = max((stop for stop in stops if text.endswith(stop)), key=len, default=None)
            if found is not None:
                return num_tokens, text if include else text[: -len(found)], found
    if at_stop_id and include:
        text += decoder.decode(bytes([_bytes_of_tokens()[tokens[-1]]]))
    if at_stop_id:
        text += decoder.decode(b"", final=True)
    return len(tokens), text, None
