"""The arguments of the worker's ``prepare`` call, made from a request, and its answer."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import attrs
import msgspec
import trio

from trioserve.protocol.errors import EngineError, InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.request import Request

MAX_EXTRA_ARGS_BYTES = 256 << 10
"""Most bytes of ``extra_args`` as MessagePack; each output sends them to the worker again."""
MAX_EXTRA_ARGS_DEPTH = 64
"""Deepest nesting of maps and lists. At MessagePack's own limit a value couldn't be part of a plan.
"""


@attrs.define(eq=False)
class WorkerCheck:
    """A check by the worker, shared by all requests in ``waiting``."""

    key: bytes
    num_bytes: int
    arguments: dict[str, Any]
    tenant: str
    """Tenant of the first request."""
    waiting: dict[Request, None] = attrs.field(factory=dict)
    """Requests that wait for the verdict, in the order of their arrival."""
    nursery: trio.Nursery | None = None
    """Nursery of the tasks that watch the requests, while the check is open."""

    @property
    def param(self) -> str:
        """Name of the request's field that is checked."""
        for name in ("grammar", "extra_args"):
            if self.arguments[name]:
                return name
        return "logits_processors"


def check_of(params: SamplingParams, tenant: str) -> WorkerCheck | None:
    """Return the check that ``params`` need; None if they need none.

    Raises:
        InvalidRequest: ``params`` can't be sent to the worker.
    """
    grammar, extra_args = params.grammar, params.extra_args
    if grammar is None and not extra_args and not params.logits_processors:
        return None
    encoded = []
    as_list = None if grammar is None else [grammar.kind, grammar.text]
    for name, value in (("grammar", as_list), ("extra_args", extra_args)):
        try:
            encoded.append(msgspec.msgpack.encode(value, order="deterministic"))
            plain = msgspec.msgpack.decode(encoded[-1])
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refusal_of(f"{name} can't be sent to the worker: {error}", name) from error
    if len(encoded[1]) > MAX_EXTRA_ARGS_BYTES:
        raise refusal_of(
            f"extra_args must have at most {MAX_EXTRA_ARGS_BYTES} bytes as MessagePack, "
            f"got {len(encoded[1])}",
            "extra_args",
        )
    if _nests_deeper(plain, MAX_EXTRA_ARGS_DEPTH):
        message = f"extra_args may have {MAX_EXTRA_ARGS_DEPTH} maps and lists in one another"
        raise refusal_of(message, "extra_args")
    processors = list(params.logits_processors)
    whole = b"".join([*encoded, msgspec.msgpack.encode(processors)])
    arguments = {"grammar": as_list, "extra_args": extra_args}
    if processors:
        arguments["logits_processors"] = processors
    return WorkerCheck(hashlib.sha256(whole).digest(), len(whole), arguments, tenant)


def _nests_deeper(value: Any, most: int) -> bool:
    """Return True if maps and lists are nested more than ``most`` deep."""
    level = [value]
    for _ in range(most):
        maps = [each.values() for each in level if isinstance(each, dict)]
        lists = [each for each in level if isinstance(each, list)]
        level = list(itertools.chain(*maps, *lists))
    return any(isinstance(each, (dict, list)) for each in level)


def read_answer(answer: Any) -> tuple[InvalidRequest | None, int]:
    """Return the refusal in an answer, None on success, and the bytes of the compiled grammar.

    Raises:
        EngineError: The answer is malformed.
    """
    match answer:
        case None:
            return None, 0
        case int(num_bytes):
            return None, num_bytes
        case {"error": str(message), "param": str(param)}:
            return refusal_of(message, param), 0
    raise EngineError(f"prepare: the worker answered {answer!r}")


def refusal_of(message: str, param: str) -> InvalidRequest:
    """Return the error for the request's field ``param``."""
    return InvalidRequest(message, param=param)
