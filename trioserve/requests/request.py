"""Requests and sequences, their states, and their ends.

A :class:`Request` owns one or more :class:`Sequence` objects, which the scheduler computes. A
sequence has two lifetimes. Its *compute* lifetime is the state below; only the scheduler and the
tokenizer move it. Its *delivery* lifetime ends when the detokenizer has issued the final chunk
(``delivered``). That may be before the end of the compute lifetime, if a stop string was found in
the text, or after it.

========== ===================================================================================
state      meaning
========== ===================================================================================
created    the request exists, nothing has looked at it
tokenizing the tokenizer has it
waiting    admitted: in the scheduler's queue, holds no slot (also after a preemption)
prefill    holds a slot; some of its known tokens have not been given to a plan
decode     holds a slot; every known token has been given to a plan
preempted  its slot is being closed; plans in flight still name it
finished   no plan to come will name it; plans in flight may
========== ===================================================================================

No other module keeps a list of live sequences. They ask the state, and :data:`TRANSITIONS` is the
only list of its changes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import attrs
import msgspec
import trio

from trioserve.protocol.sampling import SamplerParams, SamplingParams
from trioserve.protocol.wire import TensorPiece, from_ints
from trioserve.requests.adapters import NO_ADAPTER
from trioserve.requests.embedded import (
    PREFIX,
    ContentIds,
    EmbeddedMedia,
    EmbeddedSpan,
    take_marks,
)
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import Prompt, TokenizedPrompt, embeddings_in
from trioserve.requests.retention import Retention
from trioserve.requests.stream import Stream, TokenLogprob
from trioserve.requests.tensors import RequestTensors

MAX_HISTORY = 32
"""States that a sequence remembers of the time since it first lost its slot."""


class State(enum.Enum):
    """The stage of a sequence in its compute lifetime, as the module's table explains it."""

    CREATED = "created"
    TOKENIZING = "tokenizing"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATED: frozenset({State.TOKENIZING, State.WAITING, State.FINISHED}),
    State.TOKENIZING: frozenset({State.WAITING, State.FINISHED}),
    State.WAITING: frozenset({State.PREFILL, State.FINISHED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED, State.FINISHED}),
    State.DECODE: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.WAITING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


class FinishReason(enum.StrEnum):
    """The reason for a sequence's end, in the words that clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@attrs.frozen
class Finish:
    """The end of a sequence.

    ``stop_reason`` is the stop id or stop string, None for the model's own end of sequence. The
    caller's stream raises ``error``; only ``abort`` and ``error`` may have one.
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    error: Exception | None = None
    beam_logprob: float | None = None
    """Sum of the tokens' processed log-probabilities, of an output of a beam search."""


@attrs.define
class Times:
    """The times of a request's stages, in seconds on trio's clock; None for not yet.

    ``last_token`` stands still while a sequence decodes, and is right once it has ended.
    """

    arrived: float
    queued: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


@attrs.define(eq=False, kw_only=True)
class Request:
    """A caller's request. It lives as long as the caller's block.

    The tokenizer tells :meth:`tokenized`; the scheduler sets ``admitted`` (with ``rejection`` when
    it refuses). Reading a request's progress needs no lock: everything happens on trio's thread.
    """

    id: str
    prompt: Prompt
    params: SamplingParams
    stream: Stream
    times: Times
    priority: int = 0
    """Smaller runs sooner under the priority policy."""
    cache_salt: str = ""
    """A digest of the caller's; requests share cached prefixes only with those of the same salt."""
    tenant: str = ""
    """The name under which its share of the queue counts; empty for none."""
    retention: Retention | None = None
    """The priority of its pages once it has ended."""
    adapter: int = NO_ADAPTER
    """The number of its adapter."""
    traceparent: str = ""
    """The caller's W3C trace context, for the span of this request."""
    tracestate: str = ""
    """The vendor's part of the trace context."""
    max_prompt_tokens: int | None = None
    """Cut a longer prompt to this many tokens, on the side that the parameters name."""
    default_max_tokens: int | None = None
    """Output tokens where the parameters name no ``max_tokens``; None for as many as fit."""
    fewest_tokens: int = 0
    """A lower bound of the prompt's tokens, known before it is tokenized."""
    prefix_ids: tuple[int, ...] = ()
    """Tokens that come before those of ``prompt``; first those of :attr:`num_virtual_tokens`."""
    num_virtual_tokens: int = 0
    """Tokens at the beginning of ``prompt_ids`` in whose places its adapter has embeddings."""
    prompt_ids: list[int] = attrs.field(factory=list)
    sequences: list[Sequence] = attrs.field(factory=list)
    """Its outputs."""
    spare_sequences: list[Sequence] = attrs.field(factory=list)
    """Sequences that hold beams besides ``sequences``; nothing of them is delivered."""
    beams: Any = None
    """The scheduler's own record of its beam search."""
    num_moves: int = attrs.field(init=False, default=0)
    """Number of times that it went from one scheduler to another."""
    _scheduler: Any = attrs.field(init=False, default=None)
    num_cached_when_placed: int = 0
    """Tokens of the prompt that the prefix cache there had when it was placed."""
    hands_over: bool = False
    """True if another worker goes on with its outputs once the prompt is computed."""
    coming: Any = None
    """The router's record of its prompt, until that has been computed."""
    admitted: trio.Event = attrs.field(factory=trio.Event)
    on_tokenized: Callable[[], None] | None = None
    """Called when ``prompt_ids`` are there; may raise ``QueueFull``."""
    on_admitted: Callable[[], None] | None = None
    """Called when ``admitted`` is set, before the tasks that wait for it run."""
    rejection: Exception | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """The prompt's log-probabilities so far, if wanted: complete before the first chunk."""
    tensors: RequestTensors | None = None
    """The hidden states and logits so far, if wanted."""
    vector: bytes = b""
    """The pooled hidden states of the prompt, a float32 column, where asked for."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache when it first ran."""

    embedded: list[EmbeddedSpan] = attrs.field(factory=list, repr=False)
    """Positions of the prompt with embeddings in place of tokens."""
    _prompt_column: bytes = attrs.field(default=b"", repr=False)
    _cache_ids: list[int] = attrs.field(init=False, factory=list, repr=False)
    _cache_column: bytes = attrs.field(init=False, default=b"", repr=False)

    def prompt_column(self) -> bytes:
        """Return ``prompt_ids``, which must be there, as on the wire.

        The router, the prefix cache and the message to the worker share it. It was encoded where
        the prompt was tokenized, or is now.
        """
        if not self._prompt_column:
            self._prompt_column = from_ints(self.prompt_ids)
        return self._prompt_column

    @property
    def own_prompt_ids(self) -> list[int]:
        """The ids of the prompt without virtual tokens: those that its caller is told."""
        virtual = self.num_virtual_tokens
        return self.prompt_ids[virtual:] if virtual else self.prompt_ids

    @property
    def num_prefix_tokens(self) -> int:
        """Number of its virtual tokens if the adapter has their keys and values, else 0."""
        has_prefix = bool(self.embedded) and self.embedded[0].kind == PREFIX
        return self.num_virtual_tokens if has_prefix else 0

    @property
    def worker_adapter(self) -> int:
        """The number of its adapter for the worker, which knows LoRA adapters only."""
        return NO_ADAPTER if self.num_virtual_tokens else self.adapter

    @property
    def cache_ids(self) -> list[int]:
        """The ids by which the prefix cache knows the prompt; tokens have their own."""
        return self._cache_ids if self.embedded else self.prompt_ids

    def cache_column(self) -> bytes:
        """Return :attr:`cache_ids` as on the wire."""
        return self._cache_column if self.embedded else self.prompt_column()

    def put_in_front(self, spans: Seq[EmbeddedSpan]) -> None:
        """Give the virtual tokens, in whose places there are other tokens, their embeddings."""
        self.num_virtual_tokens = spans[-1].stop
        self.embedded = [*spans, *self.embedded]

    def name_contents(self, contents: ContentIds) -> None:
        """Give the positions with embeddings their ids for the prefix cache."""
        self._cache_ids = contents.named(self.prompt_ids, self.embedded)
        self._cache_column = from_ints(self._cache_ids)

    @property
    def scheduler(self) -> Any:
        """The scheduler that computes it; None until it is placed on one."""
        return self._scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.num_moves += self._scheduler not in (None, scheduler)
        self._scheduler = scheduler

    @property
    def all_sequences(self) -> list[Sequence]:
        """The sequences that are computed: those of its outputs, and spare ones."""
        return self.sequences + self.spare_sequences

    @property
    def ended(self) -> bool:
        """True if nothing more is to be computed for it."""
        return all(sequence.state is State.FINISHED for sequence in self.sequences)

    def encoded(
        self,
        prompt_ids: list[int],
        prediction_ids: list[int],
        media: Seq[EmbeddedMedia] = (),
    ) -> TokenizedPrompt:
        """Return the ids of the prompt, after those of the prefix, and of the predicted output.

        They are encoded for the wire. It may run in a thread. ``media`` are the prompt's.
        """
        ids = [*self.prefix_ids, *prompt_ids] if self.prefix_ids else prompt_ids
        embedded = take_marks(ids, [*embeddings_in(self.prompt), *media])
        return TokenizedPrompt(ids, from_ints(ids), from_ints(prediction_ids), embedded)

    def tokenized(self, prompt: TokenizedPrompt) -> None:
        """Set the ids of the prompt, and of the predicted output.

        Raises:
            QueueFull: The queue has no room for them, so the request must be rejected.
        """
        self.prompt_ids, self._prompt_column, prediction, self.embedded = prompt
        if prediction:
            for sequence in self.sequences:
                sequence.sampler = attrs.evolve(sequence.sampler, prediction=prediction)
        if self.on_tokenized is not None:
            self.on_tokenized()

    def take_rows(self, index: int, piece: TensorPiece) -> None:
        """Take rows of the output tensors, which output ``index`` gave."""
        assert self.tensors is not None
        self.tensors.add(index, piece)

    def admit(self) -> None:
        """Let the caller go on: the request is in the queue. Idempotent."""
        if self.admitted.is_set():
            return
        self.admitted.set()
        if self.on_admitted is not None:
            self.on_admitted()
        self.on_tokenized = self.on_admitted = None

    def reject(self, error: Exception) -> None:
        """Let the caller go on, into ``error``; every sequence is finished. Idempotent."""
        if self.admitted.is_set():
            return
        self.rejection = error
        for sequence in self.sequences:
            if sequence.state is not State.FINISHED:
                sequence.finish = Finish(FinishReason.ERROR, error=error)
                sequence.move_to(State.FINISHED)
        self.admit()


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One continuation of a request's prompt.

    ``output_ids`` are the tokens that the scheduler has accepted, in order. It never shrinks,
    except that a beam search may replace it. The delivered part is a prefix of it. ``max_tokens``
    and ``sampler`` are resolved (defaults, model length) before the scheduler sees the sequence.
    """

    request: Request
    index: int = 0
    sampler: SamplerParams
    max_tokens: int = 0
    output_ids: list[int] = attrs.field(factory=list)
    state: State = State.CREATED
    finish: Finish | None = None
    finished_in: State | None = None
    """The state in which it finished."""
    num_draft_tokens: int = 0
    """Number of draft tokens that were verified for it."""
    num_accepted_drafts: int = 0
    """Number of those that were accepted."""
    last_token: float | None = None
    """Time of its newest token, in seconds on trio's clock."""
    history: deque[tuple[State, float]] | None = None
    """The newest states since it first lost its slot, with times on trio's clock. None for most
    sequences, because they never lose it."""
    delivered: bool = False
    seq_state: Any = None
    """The scheduler's own record (slot, pages) while it holds one."""
    delivery: Any = None
    """The detokenizer's own record (decoder, stop matcher) while it holds one."""

    def move_to(self, state: State) -> None:
        """Change the state. A change that :data:`TRANSITIONS` doesn't list is a bug and asserts."""
        assert state in TRANSITIONS[self.state], f"{self.request.id}: {self.state} to {state}"
        if state is State.FINISHED:
            self.finished_in = self.state
        coming = self.request.coming
        if coming is not None and self.index == 0 and state in (State.DECODE, State.FINISHED):
            coming.end()
            self.request.coming = None
        self.state = state

    def note_history(self, now: float) -> None:
        """Note the present state and its beginning, if it has ever lost its slot."""
        if self.state is State.PREEMPTED and self.history is None:
            self.history = deque(maxlen=MAX_HISTORY)
        if self.history is not None:
            self.history.append((self.state, now))

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.request.prompt_ids) + len(self.output_ids)


class SequenceOutput(msgspec.Struct, frozen=True, gc=False):
    """One step's addition to one sequence, from the scheduler to the detokenizer.

    ``logprobs`` is parallel to ``token_ids`` or None; its texts are still empty. There is one for
    every token, so it is made in C and the garbage collector doesn't look at it: nothing points
    back at it.
    """

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
