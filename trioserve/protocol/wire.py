"""The messages between the engine and a worker process.

Messages are attrs classes encoded as MessagePack by msgspec, one tag byte in front. Bulk fields are
*columns*: little-endian int32 or float32 numbers held as bytes, so that a step of 256 rows costs
the envelope a few microseconds (:func:`ints`, :func:`floats` and their inverses).

The conversation: the worker says :class:`WorkerHello`; the engine checks it and answers
:class:`Start`; the worker loads its model, saying :class:`LoadingProgress` as it goes, and then
:class:`Ready` or a :class:`Failure`. From then on the engine sends :class:`Plan` messages and the
worker answers each with a :class:`StepResult`, in order; :class:`Drop` names a slot that needs no
more results. :class:`Call` and :class:`Reply` are for rare, slow operations: a reply may come long
after its call, and steps go on meanwhile. :class:`Quit` ends the worker.

Between hosts there are further messages (:mod:`trioserve.protocol.joining`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, cast, get_args

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.protocol.certificates import Credentials
from trioserve.protocol.embeddings import EmbeddingRows, ImageGrid
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.joining import Join, JoinRefusal, LinkHeartbeat, WorkerEnd
from trioserve.protocol.reports import PooledPrompt as PooledPrompt
from trioserve.protocol.reports import PromptPiece as PromptPiece
from trioserve.protocol.reports import TensorPiece as TensorPiece
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.speculation import SpeculativeConfig
from trioserve.protocol.start import MockSteps as MockSteps
from trioserve.protocol.start import Start as Start

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20
"""The longest message that either socket takes; a longer one is dropped with its connection."""
BUFFERED_MESSAGES = 64
"""The most messages that may wait in each direction of each socket."""


class WireError(Exception):
    """The bytes aren't a valid message."""


TOKEN_BYTES = 4
"""Bytes of an integer in a column."""


def from_ints(values: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """Encode integers as a column of int32."""
    if isinstance(values, np.ndarray):
        return np.asarray(values, dtype="<i4").tobytes()
    return struct.pack(f"<{len(values)}i", *values)  # Quicker for a list.


def ints(column: bytes) -> npt.NDArray[np.int32]:
    """Return the read-only int32 view of a column."""
    return np.frombuffer(column, dtype="<i4")


def from_floats(values: Sequence[float] | npt.NDArray[np.float32]) -> bytes:
    """Encode numbers as a column of float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def floats(column: bytes) -> npt.NDArray[np.float32]:
    """Return the read-only float32 view of a column."""
    return np.frombuffer(column, dtype="<f4")


@attrs.frozen(kw_only=True)
class WorkerHello:
    """Worker to engine: the first message. The engine refuses a wrong path, version or schema."""

    protocol: int
    schema: str
    package: str
    """The folder that the ``gpu`` package was imported from."""
    pid: int


@attrs.frozen(kw_only=True)
class LoadingProgress:
    """Worker to engine while it loads: ``done`` of ``total`` units of ``stage``."""

    stage: str
    done: int
    total: int


@attrs.frozen(kw_only=True)
class Ready:
    """Worker to engine: the model is loaded and the page pool exists."""

    model_checksum: str
    device: str
    device_name: str
    computing: str
    """The implementation and the weights in short; on a CPU with torch, also the reason."""
    dtype: str
    num_pages: int
    page_size: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_host_pages: int = 0
    """Number of pages in the host's memory."""
    lends_pages: bool = True
    """True if it writes pages for other workers, and reads theirs."""
    max_row_tokens: int = 1
    """The most tokens that a row of a result brings: one, and another for each accepted draft."""
    num_stages: int = 1
    """The number of stages, which compute a plan one after the other, each another plan."""
    embedding_width: int = 0
    """Width of embeddings that stand in place of tokens; 0 if the worker takes none."""
    kv_shape: list[int] = attrs.field(factory=list)
    """Layers, KV heads and numbers of a head; empty if the worker takes no keys and values."""
    hidden_size: int = 0
    """The numbers of a hidden state; 0 if it returns no hidden states and no logits."""
    free_memory: int = 0
    """Bytes of the GPU's memory that were free before anything was loaded; 0 on a CPU."""
    pid: int = 0
    """Process id of the worker; the engine sets it."""
    rank_pids: list[int] = attrs.field(factory=list)
    """Process ids of the ranks behind rank 0, in order; rank 0 is the worker's process."""
    host: str = ""
    """Name of the worker's host if that isn't the engine's; the engine sets it."""
    warning: str = ""
    """One line: why the model computes slower than it could on another machine, and what to do."""


@attrs.frozen(kw_only=True)
class OpenSlot:
    """A sequence enters the worker.

    ``tokens`` is an int32 column: the prompt and the output so far. The first ``computed`` of them
    already have their KV in the first pages of ``pages`` (a prefix hit). ``prompt_logprobs_from``
    is the position, above ``computed``, of the first prompt token that needs a log-probability; -1
    if none does. ``states_from`` is the position, not below ``computed``, of the first token whose
    hidden state is returned, and ``context_logits_from`` that of the first prompt token whose
    logits are; -1 for none. ``adapter`` is the number of an adapter loaded by the call
    ``load_adapter``, 0 for none. ``embeddings`` stand in place of those of the tokens, in the order
    of their positions; there are none for what is ``computed``. ``grids`` are those of all images,
    in the order of their positions, for a model with M-RoPE. ``prefix`` are keys and values of the
    last tokens of what is ``computed``, which the worker writes to their pages after the copies,
    even if no row follows: [n, layers, 2, KV heads, numbers of a head], where 0 of 2 is a key, as
    attention reads it.
    """

    slot: int
    generation: int
    tokens: bytes
    prompt_length: int
    computed: int
    pages: bytes
    sampler: SamplerParams
    prompt_logprobs_from: int = -1
    states_from: int = -1
    context_logits_from: int = -1
    adapter: int = 0
    embeddings: list[EmbeddingRows] = attrs.field(factory=list)
    grids: list[ImageGrid] = attrs.field(factory=list)
    prefix: list[EmbeddingRows] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class Plan:
    """Engine to worker: one step's work, as changes to the worker's state.

    A worker applies ``closed``, then ``opened``, then the cuts, then the pages, then copies, then
    writes prefixes, then computes the rows. Row i computes the next ``row_counts[i]`` tokens of
    slot ``row_slots[i]``; when that reaches the end of what the slot holds (its own last sampled
    token included), the row samples one more. Rows stand in the order in which the worker may lay
    them out; each slot occurs at most once. ``cuts`` are pairs: the block table of the slot keeps
    so many pages. ``page_slots`` and ``page_ids`` are parallel: page i is appended to the block
    table of slot i. ``copies`` are pairs: whole pages are copied from the first to the second, one
    after the other.
    Numbers from :attr:`Ready.num_pages` on are pages in the host's memory.

    A row of more tokens than the slot holds computes the slot's last token, and the worker drafts
    as many of the missing ones as it likes. Such a row brings one token, and another for each draft
    that is accepted. The block table has pages for all. What a rejected draft wrote there counts as
    not computed. The slot has no row in later plans until the result has come. Only a worker with a
    :attr:`Ready.max_row_tokens` above 1 gets such rows.
    """

    number: int
    closed: bytes = b""
    opened: list[OpenSlot] = attrs.field(factory=list)
    cuts: bytes = b""
    page_slots: bytes = b""
    page_ids: bytes = b""
    copies: bytes = b""
    row_slots: bytes = b""
    row_counts: bytes = b""


@attrs.frozen(kw_only=True)
class StepResult:
    """Worker to engine: the results of a plan, in ragged columns.

    Row i is slot ``slots[i]`` in generation ``generations[i]`` and gave the tokens
    ``tokens[offsets[i]:offsets[i+1]]``: none for a chunk of a prompt or for a sequence that had
    already stopped, otherwise one, and another for each draft that was accepted (:class:`Plan`).
    Tokens that come after a stop id in its row are dropped. ``logprobs`` is parallel to ``tokens``
    (NaN where not asked for). The k-th token's alternatives, most probable first, are
    ``top_ids[top_offsets[k]:top_offsets[k+1]]``, with ``top_logprobs`` beside them; ``top_offsets``
    is empty when no row asked for any. Likewise, the raw log-probabilities of its slot's
    ``logprob_token_ids`` are ``ids_logprobs[ids_offsets[k]:ids_offsets[k+1]]``. A negative token
    means that none could be drawn, and is the last of its row: the logits hold NaN, or the
    request's masks leave no token. ``drafted`` has for each row how many drafts it verified, and is
    empty if none did. ``prompts`` has a piece for each row that computed prompt tokens with
    log-probabilities, ``pooled`` a vector for each row that completed a prompt to be pooled,
    ``tensors`` a piece of each name for each row that computed such hidden states or logits.

    Times are microseconds: in ``step_us`` the device ran kernels of this step, in ``gap_us`` of the
    step it ran none, ``idle_us`` lie between the last step's end and this one's start, and the
    worker took ``launch_us`` to queue the kernels (0 if it computes them itself).
    """

    number: int
    slots: bytes
    generations: bytes
    offsets: bytes
    tokens: bytes
    logprobs: bytes = b""
    top_offsets: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    ids_offsets: bytes = b""
    ids_logprobs: bytes = b""
    drafted: bytes = b""
    prompts: list[PromptPiece] = attrs.field(factory=list)
    pooled: list[PooledPrompt] = attrs.field(factory=list)
    tensors: list[TensorPiece] = attrs.field(factory=list)
    step_us: int = 0
    gap_us: int = 0
    idle_us: int = 0
    launch_us: int = 0


@attrs.frozen(kw_only=True)
class Reset:
    """Engine to worker after a failure: forget every slot; plans count on from ``next_plan``."""

    next_plan: int


@attrs.frozen(kw_only=True)
class Failure:
    """Worker to engine: plan ``number`` (or, with 0, the start) failed.

    The worker then refuses every plan until it is told to :class:`Reset`. ``slot`` is -1 unless one
    slot is known to have caused it. ``fatal`` says that this worker can't go on at all.
    """

    number: int
    message: str
    slot: int = -1
    fatal: bool = False


@attrs.frozen(kw_only=True)
class Call:
    """Engine to worker: a rare, slow operation, by name. A :class:`Reply` answers it."""

    number: int
    name: str
    arguments: bytes = b""
    """The call's arguments as MessagePack."""


@attrs.frozen(kw_only=True)
class Reply:
    """Worker to engine: the answer to the call of that number; ``error`` is empty on success."""

    number: int
    error: str = ""
    result: bytes = b""


@attrs.frozen(kw_only=True)
class Quit:
    """Engine to worker: finish and exit."""


@attrs.frozen(kw_only=True)
class Drop:
    """Engine to worker: a slot that plans in flight still name needs no more results.

    Its rows in plans after ``plan`` needn't be computed and then give no token. A later plan closes
    the slot. No other sequence reads pages that such a row would write.
    """

    slot: int
    generation: int
    plan: int
    """Number of the plan that the engine took to be running. Others may share what it computes,
    even if the worker hasn't begun it.
    """


# A class's position is its tag byte, so new messages go at the end.
Message = (
    WorkerHello
    | Start
    | LoadingProgress
    | Ready
    | Plan
    | StepResult
    | Reset
    | Failure
    | Call
    | Reply
    | Quit
    | Drop
    | Join
    | JoinRefusal
    | LinkHeartbeat
    | WorkerEnd
)

_CLASSES: tuple[type, ...] = get_args(Message)
_PARTS = (
    OpenSlot,
    PromptPiece,
    PooledPrompt,
    EmbeddingRows,
    ImageGrid,
    TensorPiece,
    MockSteps,
    SamplerParams,
    Grammar,
    SpeculativeConfig,
    Credentials,
)
"""The classes of the messages' fields."""
_TAG_OF = {cls: bytes([tag]) for tag, cls in enumerate(_CLASSES)}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(
    msgspec.msgpack.Decoder(cls) for cls in _CLASSES
)


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _TAG_OF[type(message)] + _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in ``data``.

    Raises:
        WireError: an unknown tag, or a body that doesn't fit its class.
    """
    if not data or data[0] >= len(_CLASSES):
        raise WireError(f"unknown message tag in {data[:1]!r}")
    try:
        message = _DECODERS[data[0]].decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"damaged {_CLASSES[data[0]].__name__} message: {error}") from error
    return cast(Message, message)


def has_tag(data: bytes, cls: type) -> bool:
    """Return True if ``data`` begins as a message of the class ``cls`` does."""
    return data[:1] == _TAG_OF[cls]


def schema_hash() -> str:
    """Return a hash of every message's fields and types; both sides must have the same."""
    description = [
        (cls.__name__, [(field.name, str(field.type)) for field in attrs.fields(cls)])
        for cls in (*_CLASSES, *_PARTS)
    ]
    return hashlib.sha256(repr(description).encode()).hexdigest()[:16]
