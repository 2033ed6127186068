"""Every message between the engine process and a front-end process.

MessagePack by msgspec, each with its name in front. The outputs of a step are one
:class:`SchedulerUpdate`, in which most tokens are two packed integers: a sequence's number and the
token (:class:`StepUpdate`). Numbers are the front end's own, counted up. A request has the number
of its first sequence; the others follow it. Times are those of :mod:`~trioserve.front_ends.clock`.

The conversation: the front end sends :class:`FrontEndHello` (on another host
:class:`~trioserve.protocol.joining.Join`), gets :class:`FrontEndStart`, and sends
:class:`FrontEndListening`, or :class:`Failed` if it can't. Then requests go one way
(:class:`Submit`, :class:`Abort`) and updates the other, no more of them than the front end keeps up
with (:class:`Taken`). It sends a heartbeat (:class:`Alive`). Either side may call the other
(:class:`RpcCall`) and cancel the call (:class:`RpcCancel`). At the end the front end gets
:class:`Drain`, sends :class:`Drained` when it has drained, and leaves on :class:`Stop`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from trioserve.config import ServerConfig
from trioserve.front_ends.wire_errors import ErrorMessage
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.adapters import Adapter
from trioserve.requests.embedded import EmbeddedSpan
from trioserve.requests.request import Finish, FinishReason, Sequence, State
from trioserve.requests.retention import Retention
from trioserve.requests.stream import TokenLogprob

STATES = tuple(State)
"""A state travels as its place among all."""

Triples = tuple[tuple[int, float, str], ...]
Entry = tuple[int, float, Triples, Triples]
"""A token's id, its log-probability, those of the most probable tokens and of requested ones."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- both ways


class RpcCall(_Message):
    """A call of the other side by name; an :class:`RpcReply` will come."""

    number: int
    name: str
    arguments: Any = None


class RpcReply(_Message):
    """The reply to the call of that number; ``fault`` is None unless it failed."""

    number: int
    result: Any = None
    fault: ErrorMessage | None = None


class RpcCancel(_Message):
    """The end of the caller's wait for the reply to the call of that number."""

    number: int


class Failed(_Message):
    """The reason why the sender can't go on."""

    fault: ErrorMessage


# ---- from a front end


class FrontEndHello(_Message):
    """The first message, with the sender's version. Another version is refused."""

    package: str
    """The folder that trioserve was imported from."""
    version: str
    pid: int


class FrontEndListening(_Message):
    """The front end accepts connections."""


class Submit(_Message):
    """A request with a tokenized prompt and ``params.n`` sequences.

    ``sampler`` is the first sequence's, without the grammar and the arguments, which are in
    ``params``.
    """

    number: int
    id: str
    prompt_column: bytes
    """Ids of the prompt, as they also go to the worker."""
    embedded: list[EmbeddedSpan]
    """Positions of the prompt with embeddings in place of tokens."""
    params: SamplingParams
    sampler: SamplerParams
    arrived: float
    priority: int
    cache_salt: str
    tenant: str
    retention: Retention | None
    adapter: int
    default_max_tokens: int | None


class Abort(_Message):
    """Sequences to be aborted. Some of them may have ended."""

    numbers: list[int]


class Taken(_Message):
    """The number of further updates that the detokenizer has taken: others may come."""

    count: int


class Alive(_Message):
    """A heartbeat of the front end's event loop."""


class ReturnPermit(_Message):
    """The end of a limited key's request, with the number of its permit."""

    number: int


class LeaveTurn(_Message):
    """The end of a session's turn, with its number in this front end."""

    number: int


class EndSubscription(_Message):
    """The end of the subscription to snapshots with that number in this front end."""

    number: int


class Drained(_Message):
    """The end of all requests, with the number of those that were cut off."""

    num_cut: int


# ---- from the engine


class FrontEndStart(_Message):
    """The configuration of a front end."""

    index: int
    count: int
    config: ServerConfig
    name: str
    """The model's own name."""
    path: str
    """The model's folder or file: already found, never a name to be looked up."""
    files: dict[str, str]
    """Hashes of the files that a front end of another host reads there, by their names."""
    ready: wire.Ready
    sockets: list[int]
    """Descriptors of those that it listens on, among those that it has inherited; on another host
    there are none."""
    adapters: list[Adapter]


class Offered(_Message):
    """The adapters that requests may name from now on."""

    adapters: list[Adapter]


class TurnClosed(_Message):
    """The closing of the session of that turn."""

    number: int


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a sequence, and the times that are complete with it."""

    reason: str
    stop_reason: int | str | None
    fault: ErrorMessage | None
    first_token: float | None
    """Time of the request's first token."""
    last_token: float | None
    """Time of the sequence's last token."""
    vector: bytes
    """The pooled hidden states of the prompt, where asked for."""
    num_draft_tokens: int
    num_accepted_drafts: int
    beam_logprob: float | None
    """The sum of the tokens' log-probabilities, of an output of a beam search."""

    @classmethod
    def of(
        cls,
        finish: Finish,
        fault: ErrorMessage | None,
        first_token: float | None,
        last_token: float | None,
        sequence: Sequence,
    ) -> SequenceEnd:
        """Return the message's form of ``finish``, the end of ``sequence``."""
        return cls(
            *(finish.reason.value, finish.stop_reason, fault, first_token, last_token),
            *(sequence.request.vector, sequence.num_draft_tokens, sequence.num_accepted_drafts),
            finish.beam_logprob,
        )

    def finish(self, error: Exception | None) -> Finish:
        """Return the end as the scheduler has it, with ``error``, which ``fault`` describes."""
        return Finish(
            FinishReason(self.reason),
            stop_reason=self.stop_reason,
            error=error,
            beam_logprob=self.beam_logprob,
        )


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """A step's output for a sequence, unless it is just the next token."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[Entry, ...] | None
    ending: SequenceEnd | None


class StepUpdate(msgspec.Struct, frozen=True, array_like=True):
    """The outputs of one step: ``tokens[i]`` for sequence ``numbers[i]``, and then ``rows``.

    Both are columns of int64 (:func:`packed`). Several steps have the same form
    (:func:`trioserve.front_ends.coalesce.merged`).
    """

    time: float
    numbers: bytes
    tokens: bytes
    rows: list[StepRow]


class Prompt(msgspec.Struct, frozen=True, array_like=True):
    """All log-probabilities of a request's prompt."""

    number: int
    start: int
    num_top: int
    token_ids: tuple[int, ...]
    pieces: list[wire.PromptPiece]


class GivenRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of the output tensors of request ``number``, which its output ``index`` gave."""

    number: int
    index: int
    piece: wire.TensorPiece


class SchedulerUpdate(_Message):
    """All news for a front end, in the order in which it is to be taken.

    ``queue`` is the queue of all front ends: its sequences, and their tokens. ``admitted`` holds
    requests with the times at which they were queued; ``scheduled`` has the times of their first
    steps and the numbers of tokens found in the prefix cache.
    """

    queue: tuple[int, int]
    admitted: list[tuple[int, float]]
    rejected: list[tuple[int, ErrorMessage]]
    moves: list[tuple[int, int]]
    """Sequences and the places of their new states in :data:`STATES`."""
    scheduled: list[tuple[int, float, int]]
    prompts: list[Prompt]
    tensors: list[GivenRows]
    """Rows that are there with the tokens of ``step``, or of an update behind this one."""
    step: StepUpdate | None


class Drain(_Message):
    """The order to admit no new request, let the others finish, and report that."""


class Stop(_Message):
    """The order to leave now. Open requests end as when a server is stopped at once."""


FromFrontEnd = (
    FrontEndHello
    | FrontEndListening
    | Failed
    | Submit
    | Abort
    | RpcCall
    | RpcReply
    | RpcCancel
    | Taken
    | Alive
    | ReturnPermit
    | LeaveTurn
    | EndSubscription
    | Drained
)
FromEngine = (
    FrontEndStart
    | Offered
    | SchedulerUpdate
    | TurnClosed
    | RpcCall
    | RpcReply
    | RpcCancel
    | Failed
    | Drain
    | Stop
)

_ENCODER = msgspec.msgpack.Encoder()
_FROM_FRONT_END: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def messages_hash() -> str:
    """Return a hash of every message's fields and types; both sides must have the same."""
    schemas = [msgspec.json.schema(each) for each in (FromFrontEnd, FromEngine)]
    return hashlib.sha256(msgspec.json.encode(schemas)).hexdigest()[:16]


def encode(message: FromFrontEnd | FromEngine) -> bytes:
    """Return the bytes of a message.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: a value in it can't be encoded.
    """
    return _ENCODER.encode(message)


def decode_from_front_end(data: bytes) -> FromFrontEnd:
    """Return the message that a front end sent.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is none.
    """
    return _FROM_FRONT_END.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Return the message that the engine sent.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is none.
    """
    return _FROM_ENGINE.decode(data)


def packed(numbers: Iterable[int]) -> bytes:
    """Return a column of int64."""
    return array("q", numbers).tobytes()


def numbers_of(column: bytes) -> list[int]:
    """Return the numbers of a column."""
    numbers = array("q")
    numbers.frombytes(column)
    return numbers.tolist()


def plain_entries(logprobs: Iterable[TokenLogprob]) -> tuple[Entry, ...]:
    """Return log-probabilities, which have no texts yet, for a message."""
    return tuple((each.token_id, each.logprob, each.top, each.asked) for each in logprobs)


def entries_of(entries: Iterable[Entry]) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of a message."""
    return tuple(
        TokenLogprob(token_id, logprob, "", top, asked) for token_id, logprob, top, asked in entries
    )
