"""Checks that a disturbed answer is the undisturbed one, up to near-ties of rounding.

What is computed again in another batch rounds differently. Where two tokens are all but equally
good, that may turn the choice, and everything after it is another text. So two answers are compared
up to their first difference, and that is looked into: it is a near-tie if a change of the logits by
no more than ``MARGIN`` makes the sampler itself choose the one token or the other. Anything beyond
is a real difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
import torch
import trio

from gpu.sampling.sampler import Sampler
from gpu.sampling.sampler_io import SamplerRow
from gpu.sampling.truncation import BLOCK
from tests.faults.stage import Subject
from trioserve.protocol.sampling import SamplerParams

MARGIN = 1e-3
"""The margin of logits. Float32 sums of another order differ by 1e-5 or so at this model's size."""


@attrs.frozen(kw_only=True)
class Difference:
    """The first place in the output where two answers of one request part."""

    position: int
    expected: int
    given: int


def first_difference(expected: Sequence[int], given: Sequence[int]) -> Difference | None:
    """Return where ``given`` leaves ``expected``; a token that one of them lacks is -1."""
    for position in range(max(len(expected), len(given))):
        one = expected[position] if position < len(expected) else -1
        other = given[position] if position < len(given) else -1
        if one != other:
            return Difference(position=position, expected=one, given=other)
    return None


def is_near_tie(
    logits: torch.Tensor, params: SamplerParams, tokens: Sequence[int], difference: Difference
) -> bool:
    """Return whether ``MARGIN`` decides between the two tokens of ``difference``.

    Args:
        logits: [vocab_size], or log-probabilities, which are logits, too.
        params: the request's parameters.
        tokens: the prompt and the output up to the difference.
    """
    expected, given = difference.expected, difference.given
    if -1 in (expected, given):
        return False
    pairs = ((expected, given), (given, expected))
    drawn = {_draw(_tilted(logits, *pair), params, tokens) for pair in pairs}
    return drawn == {expected, given}


def _tilted(logits: torch.Tensor, towards: int, away: int) -> torch.Tensor:
    """Move ``logits`` by ``MARGIN`` in favor of a token, and of its block of the vocabulary, which
    the sampler draws first."""
    tilted = logits.clone()
    for token, change in ((away, -MARGIN), (towards, MARGIN)):
        first = token // BLOCK * BLOCK
        if towards // BLOCK != away // BLOCK:
            tilted[first : first + BLOCK] += change
        else:
            tilted[token] += change
    return tilted


def _draw(logits: torch.Tensor, params: SamplerParams, tokens: Sequence[int]) -> int:
    row = SamplerRow(params, list(tokens), len(tokens))
    return int(Sampler(len(logits), "cpu").sample(logits[None].clone(), [row]).tokens[0])


async def is_real(
    subject: Subject, request: Mapping[str, Any], output: Sequence[int], difference: Difference
) -> bool:
    """Return whether a difference is no near-tie, by the log-probabilities of that very place."""
    answer = await _complete(subject, {**request, "max_tokens": 1})
    tokens = [*answer["prompt_token_ids"], *output[: difference.position]]
    how = {"temperature": 0, "logprobs": 65536, "return_tokens_as_token_ids": True}
    answer = await _complete(subject, {"prompt": tokens, "max_tokens": 1, **how})
    found = {
        int(name.removeprefix("token_id:")): logprob
        for name, logprob in answer["logprobs"]["top_logprobs"][0].items()
    }
    logprobs = torch.full((max(found) + 1,), -torch.inf)
    logprobs[list(found)] = torch.tensor(list(found.values()))
    params = SamplerParams(temperature=request["temperature"], seed=request["seed"])
    return not is_near_tie(logprobs, params, tokens, difference)


async def _complete(subject: Subject, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only choice of an answer that isn't streamed."""
    target = subject.running.target
    body = msgspec.json.encode({"model": target.fields["model"], **fields, "stream": False})
    head = (
        f"POST {target.path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", subject.running.port) as stream:
        await stream.send_all(head.encode() + body)
        answer = b"".join([part async for part in stream])
    start, _, text = answer.partition(b"\r\n\r\n")
    if b" 200 " not in start:
        raise RuntimeError(f"asked for a place where answers part: {text.decode()}")
    choice: dict[str, Any] = msgspec.json.decode(text)["choices"][0]
    return choice
