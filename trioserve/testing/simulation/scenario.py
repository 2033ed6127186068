"""The events of one simulated run of an engine, all drawn in advance from one seed."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any, TypeVar

import attrs

from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams
from trioserve.requests.retention import Retention
from trioserve.testing.fake_model import TokenFunction

T = TypeVar("T")

_MAX_CLIENTS = 1000


@attrs.frozen(kw_only=True)
class Departure:
    """A client's departure before its output has ended."""

    how: str
    """``chunks``: after ``at`` chunks; ``error``: likewise, by an exception; ``time``: ``at``
    seconds after its arrival; ``checkpoint``: at checkpoint number ``at`` of its block.
    """
    at: float
    when_woken: bool = False
    """True to leave when the checkpoint's wait ends; False to leave when it begins."""


@attrs.frozen(kw_only=True)
class SessionUse:
    """A request as a turn of a session."""

    number: int
    """Number of the session."""
    how: str
    """The turn that it continues: ``last``: the last one; ``scratch``: none; ``replace``: none, and
    all other turns are deleted.
    """
    offset: int | None = None
    """Number of tokens to keep of the turns before; None for all."""
    timeout: float | None = None
    """Seconds without a turn until the session closes, if this client opens it."""


@attrs.frozen(kw_only=True)
class SimulatedClient:
    """A caller of ``generate``."""

    number: int
    arrives: float
    """Seconds after the engine is up."""
    prompt: Any
    """Text, token ids or messages."""
    params: dict[str, Any]
    """Fields of SamplingParams, with a seed from :func:`seed_of`."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    retention: Retention | None = None
    session: SessionUse | None = None
    adapter: str = ""
    """Name of the adapter that it requests; it waits a while until the adapter is loaded."""
    timeout: float | None = None
    leaves: Departure | None = None
    pause: float = 0.0
    """Seconds between the chunks that it reads."""
    poisonous: bool = False
    """True if a worker that computes any of its tokens dies."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs that it requests."""
        return int(self.params.get("n", 1))

    @property
    def beam_width(self) -> int:
        """Number of its beams; 0 if it samples."""
        return int(self.params.get("beam_width", 0))

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the engine computes for it."""
        return max(self.num_outputs, self.beam_width)


@attrs.frozen(kw_only=True)
class Fault:
    """A fault of a worker.

    ============ ===============================================================================
    what         event
    ============ ===============================================================================
    loading      the worker dies ``at`` seconds after its start, while it loads its model
    killed       the worker is killed from outside ``at`` seconds after it was ready
    dies         the worker dies in its step number ``at``, from 0
    fails        the plan of that step fails; the failure names no slot
    fails_in_row the plan of that step fails; the failure names the slot of one of its rows
    fatal        the plan of that step fails, and the worker must be replaced
    hangs        that step never ends
    pauses       that step takes ``seconds`` more
    cut          for ``seconds`` no message arrives, from ``at`` seconds after it was ready
    slow         likewise, messages take ``SLOW_LINK`` seconds more
    ============ ===============================================================================
    """

    worker: int
    """Number of the worker process, from 0: one comes after the other."""
    what: str
    at: float
    seconds: float = 0.0
    index: int = 0
    """Index of the engine's worker that the process belongs to."""

    @property
    def is_of_link(self) -> bool:
        """True if it concerns the link, not the process."""
        return self.what in ("cut", "slow")

    @property
    def is_at_step(self) -> bool:
        """True if it happens in a step."""
        return not self.is_of_link and self.what not in ("killed", "loading")


@attrs.frozen(kw_only=True)
class Pause:
    """A pause of the engine that loses no request."""

    at: float
    """Seconds after the engine is up."""
    mode: str
    """``wait``, ``retract`` or ``in_place``; ``swap wait``, ``swap retract`` and ``swap rolling``:
    a weight swap in that mode; ``release``: the worker is stopped.
    """
    seconds: float
    flushes: bool = False
    """True if the prefix cache is flushed meanwhile."""


@attrs.frozen(kw_only=True)
class WorkerChange:
    """An addition or removal of a worker."""

    at: float
    """Seconds after the engine is up."""
    what: str
    """``add`` or ``remove``."""
    index: int = 0
    """Index of the worker to remove."""


@attrs.frozen(kw_only=True)
class AdapterChange:
    """A load or unload of an adapter."""

    at: float
    """Seconds after the engine is up."""
    what: str
    """``load`` or ``unload``."""
    name: str
    path: str = ""
    """Folder of the adapter. Workers refuse those called ``bad``."""

    @property
    def is_bad(self) -> bool:
        """True if it can't be loaded."""
        return self.path.endswith("/bad")


@attrs.frozen(kw_only=True)
class Member:
    """A worker of a cluster, beside what all of its workers have in common."""

    slowness: float = 1.0
    """Factor of the time of its steps."""
    link_delay: float = 0.0
    """Latency of a message in either direction, in seconds."""
    clock_rate: float = 1.0
    """Seconds that it measures in a second, so that the times of its steps are reported wrongly."""


@attrs.frozen(kw_only=True)
class WorkerKind:
    """Properties of the workers."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_batched_tokens: int
    alphabet: tuple[int, ...]
    """Tokens that the model can sample."""
    no_token_every: int = 0
    """One of this many samples gives no token; 0 for never."""
    computes_past_stop: bool = False
    step_time: float = 0.01
    seconds_per_token: float = 0.0
    call_time: float = 0.0
    load_time: float = 0.1
    link_delay: float = 0.0
    """Latency of a message from the engine, in seconds."""
    pages_after_loss: int | None = None
    """Pages of every worker after the first; None for as many as the first has."""
    num_host_pages: int = 0
    """Places for pages in the host's memory."""
    disk_pages: int = 0
    """Most pages on the disk that all workers share; 0 for no disk."""
    max_row_tokens: int = 1
    """Most tokens of a row of a result."""
    num_stages: int = 1
    """Stages, which compute a plan each in a real worker."""

    def pages_of(self, worker: int) -> int:
        """Return the number of pages of the worker of that number."""
        later = self.num_pages if self.pages_after_loss is None else self.pages_after_loss
        return later if worker else self.num_pages

    @property
    def fewest_pages(self) -> int:
        """Number of pages of the smallest worker."""
        return min(self.pages_of(0), self.pages_of(1))

    def token_function(self) -> TokenFunction:
        """Return the model: tokens depend on all tokens before, the seed and the output's index."""
        alphabet, no_token_every = self.alphabet, self.no_token_every

        def token(context: list[int], sampler: SamplerParams) -> int:
            kind = sampler.seed // _MAX_CLIENTS
            start = zlib.crc32(f"{kind}/{sampler.sequence_index}".encode())
            drawn = zlib.crc32(wire.from_ints(context), start)
            if no_token_every and drawn // 65536 % no_token_every == 0:
                return -1
            return alphabet[drawn % len(alphabet)]

        return token


def num_accepted(context: list[int]) -> int:
    """Return the most tokens drafted after ``context`` that are accepted."""
    return zlib.crc32(wire.from_ints(context), 7) % 5


def seed_of(kind: int, client: int) -> int:
    """Return the seed of a client's request.

    Equal prompts of one ``kind`` get equal tokens, although each client has its own seed.
    """
    return kind * _MAX_CLIENTS + client


def client_of(sampler: SamplerParams) -> int:
    """Return the client with this seed."""
    return sampler.seed % _MAX_CLIENTS


@attrs.frozen(kw_only=True)
class Scenario:
    """The events of a simulation. ``seed`` also determines their order."""

    seed: int
    options: dict[str, Any]
    """Options of the engine."""
    worker: WorkerKind
    clients: tuple[SimulatedClient, ...]
    faults: tuple[Fault, ...] = ()
    pauses: tuple[Pause, ...] = ()
    adapters: tuple[AdapterChange, ...] = ()
    members: tuple[Member, ...] = (Member(),)
    """The first workers. One that is added has the properties of one of these."""
    changes: tuple[WorkerChange, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ends: str = "idle"
    """``idle``: the run ends when all clients are done; ``drain``: also, new requests are refused
    from ``ends_at`` on; ``abort``: also, open requests are aborted then; ``cancel``: the engine's
    scope is cancelled then.
    """
    ends_at: float = 0.0

    @property
    def is_poisoned(self) -> bool:
        """True if a client is poisonous."""
        return any(client.poisonous for client in self.clients)

    @property
    def is_cluster(self) -> bool:
        """True if there are several workers."""
        return len(self.members) > 1

    def member(self, index: int) -> Member:
        """Return the properties of the worker of that index."""
        return self.members[index % len(self.members)]

    def is_far(self, index: int) -> bool:
        """Return True if messages to the worker of that index may be on their way for a while."""
        of_link = any(each.is_of_link and each.index == index for each in self.faults)
        return of_link or self.member(index).link_delay > 0

    def only(
        self,
        clients: Collection[int] | None = None,
        faults: Collection[int] | None = None,
        pauses: Collection[int] | None = None,
        adapters: Collection[int] | None = None,
        changes: Collection[int] | None = None,
    ) -> Scenario:
        """Return the scenario with only these clients, faults, pauses and changes.

        Each argument has their indices; None keeps all.
        """
        kept = [each for each in self.clients if clients is None or each.number in clients]
        return attrs.evolve(
            self,
            clients=tuple(kept),
            faults=_at(self.faults, faults),
            pauses=_at(self.pauses, pauses),
            adapters=_at(self.adapters, adapters),
            changes=_at(self.changes, changes),
        )


def _at(events: tuple[T, ...], places: Collection[int] | None) -> tuple[T, ...]:
    return tuple(each for at, each in enumerate(events) if places is None or at in places)
