"""Every message between the engine process and a front-end process.

MessagePack by msgspec, each with its name in front. What a step gives to a front end's sequences is
one :class:`SchedulerUpdate`, in which most tokens are two packed integers: a sequence's number and
the token (:class:`StepUpdate`). Numbers are the front end's own, counted up; a request's is that of
its first sequence, and the others follow it. Times are those of :mod:`~trioserve.front_ends.clock`.

The conversation: the front end says :class:`FrontEndHello`, is told :class:`FrontEndStart`, and
says :class:`FrontEndListening` or, where it can't, :class:`Failed`. Then requests go one way
(:class:`Submit`, :class:`Abort`) and updates the other, no more of them than the front end keeps up
with (:class:`Taken`), which says again and again that it lives (:class:`Alive`). Either side may
:class:`RpcCall` the other for something rare, by name, and take that back (:class:`RpcCancel`). At
the end the front end is told to :class:`Drain`, says :class:`Drained` when it has, and leaves when
it is told to :class:`Stop`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from trioserve.config import ServerConfig
from trioserve.front_ends.wire_errors import ErrorMessage
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.requests.adapters import Adapter
from trioserve.requests.request import Finish, FinishReason, State
from trioserve.requests.retention import Retention
from trioserve.requests.stream import TokenLogprob

STATES = tuple(State)
"""A state travels as its place among all."""

Triples = tuple[tuple[int, float, str], ...]
Entry = tuple[int, float, Triples, Triples]
"""A token's id, its log-probability, the most probable ones' and those that were asked for."""


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


# ---- both ways


class RpcCall(_Message):
    """Something rare is wanted of the other side, by name; an :class:`RpcReply` will come."""

    number: int
    name: str
    arguments: Any = None


class RpcReply(_Message):
    """The answer to the question of that number; ``fault`` is None unless it failed."""

    number: int
    result: Any = None
    fault: ErrorMessage | None = None


class RpcCancel(_Message):
    """Whoever asked the question of that number doesn't wait any more."""

    number: int


class Failed(_Message):
    """The sender can't go on, and why."""

    fault: ErrorMessage


# ---- from a front end


class FrontEndHello(_Message):
    """First: who is there. A stranger is refused."""

    package: str
    """The folder that trioserve was imported from."""
    version: str
    pid: int


class FrontEndListening(_Message):
    """The front end accepts connections."""


class Submit(_Message):
    """A request whose prompt is tokenized; there are ``params.n`` sequences.

    ``sampler`` is the first sequence's, without the grammar and the arguments, which are in
    ``params``.
    """

    number: int
    id: str
    prompt_ids: bytes
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
    """Nothing more is wanted of these sequences; those that have ended may be among them."""

    numbers: list[int]


class Taken(_Message):
    """The detokenizer has taken what so many more updates gave: others may come."""

    count: int


class Alive(_Message):
    """The front end's event loop turns."""


class LeaveSeat(_Message):
    """A request of a limited key has ended, whose seat has that number."""

    number: int


class LeaveTurn(_Message):
    """A turn of a session runs no more, whose number in this front end is that."""

    number: int


class LeaveWatch(_Message):
    """Whoever watches the engine through this front end, and has that number, does so no more."""

    number: int


class Drained(_Message):
    """All that ran has ended, or was cut off: so many requests."""

    num_cut: int


# ---- from the engine


class FrontEndStart(_Message):
    """What a front end serves."""

    index: int
    count: int
    config: ServerConfig
    path: str
    """The model's folder or file: already found, never a name to be looked up."""
    ready: wire.Ready
    sockets: list[int]
    """Descriptors of those that it listens on, among those that it has inherited."""
    adapters: list[Adapter]


class Offered(_Message):
    """The adapters that requests may name from now on."""

    adapters: list[Adapter]


class TurnClosed(_Message):
    """The session of that turn was closed."""

    number: int


class SequenceEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a sequence ended, and the times that are complete with that."""

    reason: str
    stop_reason: int | str | None
    fault: ErrorMessage | None
    first_token: float | None
    """Of the request."""
    last_token: float | None
    """Of the sequence."""
    vector: bytes = b""
    """What the prompt's hidden states became, where that was asked for."""

    @classmethod
    def of(
        cls,
        finish: Finish,
        fault: ErrorMessage | None,
        first_token: float | None,
        last_token: float | None,
        vector: bytes,
    ) -> SequenceEnd:
        """What tells of ``finish``."""
        return cls(finish.reason.value, finish.stop_reason, fault, first_token, last_token, vector)

    def finish(self, error: Exception | None) -> Finish:
        """The same, with the error that ``fault`` tells of."""
        return Finish(FinishReason(self.reason), stop_reason=self.stop_reason, error=error)


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave to a sequence if it wasn't just the next token."""

    number: int
    tokens: tuple[int, ...]
    logprobs: tuple[Entry, ...] | None
    ending: SequenceEnd | None


class StepUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave: ``tokens[i]`` to sequence ``numbers[i]``, and then what ``rows`` say.

    Both are columns of int64 (:func:`packed`). What several steps gave looks the same
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


class SchedulerUpdate(_Message):
    """Everything that is new for a front end, in the order in which it is to be taken.

    ``line`` is how many sequences of all front ends wait for a slot, and how many tokens they have.
    ``admitted`` holds requests with the times at which they were queued, ``scheduled`` with those
    of their first steps and the numbers of tokens found in the prefix cache.
    """

    line: tuple[int, int]
    admitted: list[tuple[int, float]]
    rejected: list[tuple[int, ErrorMessage]]
    moves: list[tuple[int, int]]
    """Sequences and the places of their new states in :data:`STATES`."""
    scheduled: list[tuple[int, float, int]]
    prompts: list[Prompt]
    step: StepUpdate | None


class Drain(_Message):
    """Admit nothing new, let what runs finish, and say so."""


class Stop(_Message):
    """Leave now. What still runs ends as when a server is told to end at once."""


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
    | LeaveSeat
    | LeaveTurn
    | LeaveWatch
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


def encode(message: FromFrontEnd | FromEngine) -> bytes:
    """The bytes of a message.

    Raises:
        TypeError, ValueError, OverflowError, RecursionError: a value in it can't be encoded.
    """
    return _ENCODER.encode(message)


def decode_from_front_end(data: bytes) -> FromFrontEnd:
    """The message that a front end sent.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is none.
    """
    return _FROM_FRONT_END.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """The message that the engine sent.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is none.
    """
    return _FROM_ENGINE.decode(data)


def packed(numbers: Iterable[int]) -> bytes:
    """A column of int64."""
    return array("q", numbers).tobytes()


def numbers_of(column: bytes) -> list[int]:
    """The numbers of a column."""
    numbers = array("q")
    numbers.frombytes(column)
    return numbers.tolist()


def plain_entries(logprobs: Iterable[TokenLogprob]) -> tuple[Entry, ...]:
    """Log-probabilities, which have no texts yet, as they travel."""
    return tuple((each.token_id, each.logprob, each.top, each.asked) for each in logprobs)


def entries_of(entries: Iterable[Entry]) -> tuple[TokenLogprob, ...]:
    """The log-probabilities that travelled."""
    return tuple(
        TokenLogprob(token_id, logprob, "", top, asked) for token_id, logprob, top, asked in entries
    )
