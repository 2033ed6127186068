"""Looks into answers that part: asks the server for all log-probabilities of that very place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
import trio

from bench.faults.answers import Difference, is_near_tie
from bench.faults.server import Subject
from trioserve.load import Record
from trioserve.protocol.sampling import SamplerParams


class Parted(Protocol):
    """An answer to the ``request``-th request that has a difference."""

    @property
    def request(self) -> int: ...

    @property
    def difference(self) -> Difference | None: ...


async def real_differences(
    subject: Subject,
    requests: Sequence[Mapping[str, Any]],
    undisturbed: Sequence[Record],
    parted: Sequence[Parted],
) -> list[Difference]:
    """The differences of ``parted`` that are no near-ties."""
    real = []
    for answer in parted:
        difference = answer.difference
        assert difference is not None
        request = requests[answer.request]
        output = undisturbed[answer.request].token_ids[: difference.position]
        prompt = await _prompt_ids(subject, request)
        logprobs = await _logprobs_after(subject, [*prompt, *output])
        params = SamplerParams(temperature=request["temperature"], seed=request["seed"])
        if not is_near_tie(logprobs, params, [*prompt, *output], difference):
            real.append(difference)
    return real


async def _prompt_ids(subject: Subject, request: Mapping[str, Any]) -> list[int]:
    answer = await _complete(subject, {**request, "max_tokens": 1})
    ids: list[int] = answer["prompt_token_ids"]
    return ids


async def _logprobs_after(subject: Subject, tokens: list[int]) -> torch.Tensor:
    """[vocab_size]: the log-probability of each token after ``tokens``."""
    asked = {
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 65536,
        "return_tokens_as_token_ids": True,
    }
    answer = await _complete(subject, asked)
    found = {
        int(name.removeprefix("token_id:")): logprob
        for name, logprob in answer["logprobs"]["top_logprobs"][0].items()
    }
    logprobs = torch.full((max(found) + 1,), -torch.inf)
    logprobs[list(found)] = torch.tensor(list(found.values()))
    return logprobs


async def _complete(subject: Subject, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The only choice of an answer that isn't streamed."""
    target = subject.target
    body = msgspec.json.encode({"model": target.fields["model"], **fields, "stream": False})
    head = (
        f"POST {target.path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream("127.0.0.1", subject.running.port) as stream:
        await stream.send_all(head.encode() + body)
        answer = b"".join([part async for part in stream])
    head, _, text = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head:
        raise RuntimeError(f"asked for a place where answers part: {text.decode()}")
    choice: dict[str, Any] = msgspec.json.decode(text)["choices"][0]
    return choice
