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

from trioserve.protocol.sampling import SamplerParams
from trioserve.testing.fake_model import adapter_shift, draw, fake_logprob, fake_logprobs
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
    return [_output(scenario, client, adapter, index) for index in range(client.num_outputs)]


def text_of(tokens: Iterable[int]) -> str:
    """Return the text of ``tokens``."""
    return bytes(map(_bytes_of_tokens().__getitem__, tokens)).decode("utf-8", "replace")


def _output(
    scenario: Scenario, client: SimulatedClient, adapter: str, index: int
) -> ExpectedOutput:
    params = client.params
    prompt = prompt_ids_of(client)
    stops = set(params.get("stop_token_ids", ()))
    stop_ids = stops if params.get("ignore_eos") else stops | set(scenario.eos_token_ids)
    sampler = SamplerParams(
        seed=params["seed"],
        sequence_index=index,
        allowed_token_ids=list(params.get("allowed_token_ids") or ()),
    )
    token_function = scenario.worker.token_function()
    min_tokens = params.get("min_tokens", 0)
    tokens: list[int] = []
    reason = "length"
    stop_reason: int | str | None = None
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
    num_tokens, text, found = _cut(tokens, reason, client)
    if found is not None:
        reason, stop_reason = "stop", found
    tokens = tokens[:num_tokens]
    contexts = [prompt + tokens[:place] for place in range(num_tokens)]
    asked_ids = list(params.get("logprob_token_ids", ()))
    return ExpectedOutput(
        token_ids=tuple(tokens),
        text=text,
        finish_reason=reason,
        stop_reason=stop_reason,
        logprobs=tuple(fake_logprob(token, 0) for token in tokens),
        asked=tuple(
            tuple(fake_logprobs(context, NUM_TOKENS)[asked_ids].tolist()) for context in contexts
        )
        if asked_ids
        else (),
    )


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
