"""What happens in one simulated life of an engine: all of it chosen beforehand, from one seed."""

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
    """How a client leaves before its output has ended."""

    how: str
    """``chunks``: after so many chunks; ``error``: the same, by an exception of its own; ``time``:
    so many seconds after it came; ``checkpoint``: at the so-manieth checkpoint of its block."""
    at: float
    when_woken: bool = False
    """At that checkpoint: when what it waited for has come, instead of when it begins to wait."""


@attrs.frozen(kw_only=True)
class SessionUse:
    """A client's request is a turn of a session."""

    number: int
    """Which session."""
    how: str
    """``last``: it goes on from the last turn; ``anew``: from none; ``replace``: from none, and
    all others are forgotten."""
    offset: int | None = None
    """How many tokens are kept of what came before."""
    timeout: float | None = None
    """Seconds without a turn after which the session is closed, if this client opens it."""


@attrs.frozen(kw_only=True)
class SimulatedClient:
    """One caller of ``generate``."""

    number: int
    arrives: float
    """Seconds after the engine is up."""
    prompt: Any
    """Text, token ids or messages."""
    params: dict[str, Any]
    """Fields of SamplingParams, with a seed that :func:`seed_of` made."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    retention: Retention | None = None
    session: SessionUse | None = None
    adapter: str = ""
    """The name that it asks for when it is loaded, or after some time."""
    timeout: float | None = None
    leaves: Departure | None = None
    pause: float = 0.0
    """Seconds that it takes over each chunk."""
    poisonous: bool = False
    """A worker that computes anything for it dies."""

    @property
    def num_outputs(self) -> int:
        """How many outputs it asks for."""
        return int(self.params.get("n", 1))


@attrs.frozen(kw_only=True)
class Fault:
    """Something that befalls a worker.

    ======= =======================================================================================
    what    at
    ======= =======================================================================================
    loading the worker dies while it loads its model (seconds after its start)
    killed  from outside, at that many seconds after it was ready
    dies    in the step of that number (the worker's own count from 0)
    fails   the plan of that step fails, and nobody is named
    blames  the same, and the slot of one of its rows is named
    fatal   the same, and the worker says that it can't go on
    hangs   that step never ends
    pauses  that step takes ``seconds`` more
    ======= =======================================================================================
    """

    worker: int
    """Which one of the workers, from 0."""
    what: str
    at: float
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Pause:
    """Nothing is computed for a while, in a way that loses nothing."""

    at: float
    """Seconds after the engine is up."""
    mode: str
    """``wait``, ``retract`` or ``in_place``; ``exchange wait`` and ``exchange retract``: weights
    are exchanged in that mode; ``release``: the worker is sent away."""
    seconds: float
    flushes: bool = False
    """Whether the prefix cache is emptied meanwhile."""


@attrs.frozen(kw_only=True)
class AdapterChange:
    """Somebody has an adapter loaded or unloaded."""

    at: float
    """Seconds after the engine is up."""
    what: str
    """``load`` or ``unload``."""
    name: str
    path: str = ""
    """The folder that it is loaded from. Workers refuse those called ``bad``."""

    @property
    def is_bad(self) -> bool:
        """Whether it can't be loaded."""
        return self.path.endswith("/bad")


@attrs.frozen(kw_only=True)
class WorkerKind:
    """What the workers are like."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_batched_tokens: int
    alphabet: tuple[int, ...]
    """The tokens that the model ever draws."""
    nothing_in: int = 0
    """One draw in so many gives no token at all; 0 for never."""
    computes_past_stop: bool = False
    step_time: float = 0.01
    seconds_per_token: float = 0.0
    call_time: float = 0.0
    load_time: float = 0.1
    link_delay: float = 0.0
    """Seconds that a message of the engine is under way."""
    pages_after_loss: int | None = None
    """Pages of every worker but the first, if they have fewer."""
    num_host_pages: int = 0
    """Places for pages in the host's memory."""
    max_row_tokens: int = 1
    """The most tokens that a row of a result brings."""

    def pages_of(self, worker: int) -> int:
        """The pages of one of the workers."""
        later = self.num_pages if self.pages_after_loss is None else self.pages_after_loss
        return later if worker else self.num_pages

    @property
    def fewest_pages(self) -> int:
        """The pages of the smallest of them."""
        return min(self.pages_of(0), self.pages_of(1))

    def token_function(self) -> TokenFunction:
        """The model: tokens depend on all that is before them, the seed and the output's index."""
        alphabet, nothing_in = self.alphabet, self.nothing_in

        def token(context: list[int], sampler: SamplerParams) -> int:
            kind = sampler.seed // _MAX_CLIENTS
            start = zlib.crc32(f"{kind}/{sampler.sequence_index}".encode())
            drawn = zlib.crc32(wire.from_ints(context), start)
            if nothing_in and drawn // 65536 % nothing_in == 0:
                return -1
            return alphabet[drawn % len(alphabet)]

        return token


def num_accepted(context: list[int]) -> int:
    """Return how many tokens drafted after ``context`` are accepted, if there are so many."""
    return zlib.crc32(wire.from_ints(context), 7) % 5


def seed_of(kind: int, client: int) -> int:
    """A request's seed: clients of one ``kind`` get the same tokens, and can be told apart."""
    return kind * _MAX_CLIENTS + client


def client_of(sampler: SamplerParams) -> int:
    """The client whose seed it is."""
    return sampler.seed % _MAX_CLIENTS


@attrs.frozen(kw_only=True)
class Scenario:
    """Everything that is to happen. ``seed`` gives the order of events as well."""

    seed: int
    options: dict[str, Any]
    """Of the engine."""
    worker: WorkerKind
    clients: tuple[SimulatedClient, ...]
    faults: tuple[Fault, ...] = ()
    pauses: tuple[Pause, ...] = ()
    adapters: tuple[AdapterChange, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ends: str = "idle"
    """``idle``: when all clients are done; ``drain``: the same, and nobody is admitted after
    ``ends_at``; ``abort``: all that is open is aborted then, too; ``cancel``: the engine's scope
    is cancelled then."""
    ends_at: float = 0.0

    @property
    def is_poisoned(self) -> bool:
        """Whether one of the clients ends workers."""
        return any(client.poisonous for client in self.clients)

    def only(
        self,
        clients: Collection[int] | None = None,
        faults: Collection[int] | None = None,
        pauses: Collection[int] | None = None,
        adapters: Collection[int] | None = None,
    ) -> Scenario:
        """The same with these clients, by number, these of all else, by place; None: all."""
        kept = [each for each in self.clients if clients is None or each.number in clients]
        return attrs.evolve(
            self,
            clients=tuple(kept),
            faults=_at(self.faults, faults),
            pauses=_at(self.pauses, pauses),
            adapters=_at(self.adapters, adapters),
        )


def _at(events: tuple[T, ...], places: Collection[int] | None) -> tuple[T, ...]:
    return tuple(each for at, each in enumerate(events) if places is None or at in places)
