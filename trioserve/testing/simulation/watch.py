"""Checks of every plan and result between the engine and one of its workers.

The checker records, from the messages alone, the pages that each plan in flight may touch and the
owners of its rows. So it finds a page or slot that is reused too early, a row for a request that
has ended, and an output that gets a slot out of order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator

import attrs
import msgspec
import trio

from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.testing.simulation.places import PlaceChecker
from trioserve.testing.simulation.scenario import client_of
from trioserve.testing.simulation.sharing import SharingChecker
from trioserve.testing.simulation.trace import Trace, Violation
from trioserve.testing.simulation.turns import OrderChecker, Row
from trioserve.workers import Link


@attrs.define(eq=False)
class _OpenSlot:
    row: Row
    generation: int
    pages: list[int]
    has_output: bool = False
    """True once a result brought a token since it was opened."""


@attrs.define(eq=False)
class _PlanInFlight:
    number: int
    touched: dict[int, tuple[int, tuple[int, ...]]]
    """By slot: the generation, and the pages that a row may read or write."""
    rows: list[Row]
    unknown: set[int]
    """The slots that get no further row before the result: that may bring several tokens, or on a
    worker with stages one.
    """


@attrs.define(eq=False)
class MessageChecker:
    """Records and checks the messages of one worker, over all of its processes."""

    index: int
    label: str
    """The worker's name before each event; "" if there is only one."""
    trace: Trace
    depth: int
    num_stages: int
    page_size: int
    is_over: Callable[[Row], bool]
    """Returns True if no more tokens may be computed for an output."""
    adapter_is_gone: Callable[[int], bool]
    """Returns True if the adapter of a client's request was unloaded."""
    on_fault: Callable[[], None]
    """Called when a process is lost or a plan fails."""
    after_step: Callable[[], None]
    """Called when the engine has made a plan or taken a message."""
    report: Callable[[Exception], None]
    """Called with a violation."""
    turns: OrderChecker
    sharing: SharingChecker
    places: PlaceChecker
    slots: dict[int, _OpenSlot] = attrs.field(factory=dict)
    in_flight: deque[_PlanInFlight] = attrs.field(factory=deque)
    lost_with: set[int] = attrs.field(factory=set)
    """Clients that were in flight when a process was lost."""
    since_flush: set[int] | None = None
    """Pages handed out since the prefix cache was flushed last, and their copies; None before the
    first time.
    """
    num_unanswered: int = 0
    """Plans without an answer. A worker also answers the plans that it refuses."""
    calls: dict[int, str] = attrs.field(factory=dict)
    """Names of unanswered calls, by number."""
    num_steps: int = 0
    num_tokens: int = 0
    steps_of_worker: int = 0
    num_ready: int = 0
    """Number of processes so far."""
    deaths: int = 0
    deaths_without_progress: int = 0
    num_failures: int = 0
    is_failing: bool = False
    """True once the process has failed for good, until its loss is recorded."""
    num_poisoned: int = 0
    """Processes that a poisonous client has ended."""

    def note(self, event: str) -> None:
        """Record an event of the worker."""
        self.trace.note(f"{self.label}{event}")

    def is_calling(self, *names: str) -> bool:
        """Return True if a call with one of ``names`` is unanswered."""
        return any(name in names for name in self.calls.values())

    def worker_ready(self) -> None:
        """Record a new process, which has no state."""
        self.num_ready += 1
        self._forget()

    def _forget(self) -> None:
        self.slots.clear()
        self.in_flight.clear()
        self.calls.clear()
        self.places.forget(self.index)
        self.steps_of_worker = self.num_unanswered = 0

    def worker_lost(self) -> None:
        """Record that the process was lost."""
        self.lost_with |= {client for plan in self.in_flight for client, _ in plan.rows}
        self._suspect([row for plan in self.in_flight for row in plan.rows])
        self.on_fault()
        self.deaths += 1
        self.is_failing = False
        self.deaths_without_progress = (
            1 if self.steps_of_worker else self.deaths_without_progress + 1
        )
        self._forget()

    def _suspect(self, rows: list[Row]) -> None:
        """Record ``rows`` as possible causes of a failure."""
        clients = {client for client, _ in rows}
        if len(clients) == 1:
            self.places.possible_culprits |= clients

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report a violation in the block, without an exception in the engine."""
        try:
            yield
        except Exception as error:
            self.report(error)

    # ---- the engine's messages

    def on_send(self, message: wire.Message) -> None:
        """Check ``message``, which the engine has just made."""
        if isinstance(message, wire.Plan):
            self._on_plan(message)
        elif isinstance(message, wire.Reset):
            self.note("reset")
            self.slots.clear()
            self.in_flight.clear()
            self.places.forget(self.index)
        elif isinstance(message, wire.Drop):
            self.note(f"drop {message.slot}")
        elif isinstance(message, wire.Call):
            self.note(f"call {message.number} {message.name}")
            self.calls[message.number] = message.name
            if message.name in ("import_pages", "read_pages") and self.since_flush is not None:
                # A cache has only pages from after the flush, which emptied all of them.
                self.since_flush.update(msgspec.msgpack.decode(message.arguments)["places"])

    def _on_plan(self, plan: wire.Plan) -> None:
        closed = wire.ints(plan.closed).tolist()
        for slot in closed:
            self.turns.closed(self.slots.pop(slot).row)
        self._follow_copies(wire.ints(plan.copies).reshape(-1, 2).tolist())
        fresh = [pair for opened in plan.opened for pair in self._open(opened)]
        self.turns.opened([self.slots[opened.slot].row for opened in plan.opened])
        cuts = wire.ints(plan.cuts).reshape(-1, 2).tolist()
        for slot, num_pages in cuts:
            del self.slots[slot].pages[num_pages:]
        pages = _pairs(plan.page_slots, plan.page_ids)
        # A slot that is opened may get a page that the same plan cuts from another one.
        for slot, page in (*fresh, *pages):
            self._check_page_is_fresh(slot, page)
            self.slots[slot].pages.append(page)
        counts = _pairs(plan.row_slots, plan.row_counts)
        rows = [(self.slots[slot].row, count) for slot, count in counts]
        self.note(
            f"plan {plan.number}: "
            + " ".join(f"{client}.{index}x{count}" for (client, index), count in rows)
            + "".join(f" open {each.slot}@{each.computed}" for each in plan.opened)
            + (f" close {closed}" if closed else "")
            + (f" cut {cuts}" if cuts else "")
            + (f" pages {pages}" if pages else "")
        )
        self.places.planned(self.index, [row for row, _ in rows])
        for row, _ in rows:
            if self.is_over(row):
                raise Violation("nothing is computed for a client that has left", f"output {row}")
            if self.adapter_is_gone(row[0]):
                raise Violation("an adapter leaves when no output uses it", f"output {row}")
        unknown = {
            slot
            for slot, count in counts
            if (count > 1 or self.num_stages > 1) and self.slots[slot].has_output
        }
        if any(slot in each.unknown for each in self.in_flight for slot, _ in counts):
            raise Violation("a sequence waits until its tokens are known", f"plan {plan.number}")
        self.sharing.planned(counts)
        touched = {
            slot: (self.slots[slot].generation, tuple(self.slots[slot].pages)) for slot, _ in counts
        }
        self.num_unanswered += 1
        self.in_flight.append(
            _PlanInFlight(plan.number, touched, [row for row, _ in rows], unknown)
        )
        if len(self.in_flight) > self.depth:
            raise Violation("no more plans are in flight than allowed")

    def _open(self, opened: wire.OpenSlot) -> list[tuple[int, int]]:
        """Open a slot with the pages that it shares; return it with each page of its own."""
        for plan in self.in_flight:
            if opened.slot in plan.touched:
                raise Violation(
                    "a slot is reused only after all plans with it are acknowledged",
                    f"slot {opened.slot}, plan {plan.number}",
                )
        sampler = opened.sampler
        row = client_of(sampler), sampler.sequence_index
        if any(other.row == row for other in self.slots.values()):
            raise Violation("an output has one slot", f"output {row}")
        self.sharing.opened(opened, row[0])
        self.places.opened(opened, row)
        pages = wire.ints(opened.pages).tolist()
        shared = opened.computed // self.page_size
        is_beam = sampler.processed_logprobs  # which shares the pages of one that still runs
        old = self.since_flush is not None and not self.since_flush.issuperset(pages[:shared])
        if old and not is_beam:
            raise Violation("nothing is found that was computed before a flush", f"output {row}")
        self.slots[opened.slot] = _OpenSlot(row, opened.generation, pages[:shared])
        return [(opened.slot, page) for page in pages[shared:]]

    def _follow_copies(self, copies: list[list[int]]) -> None:
        """Take a copy to be as old as its source. On the way to the host and back a page changes
        its number.
        """
        if self.since_flush is not None:
            for source, target in copies:
                if source in self.since_flush:
                    self.since_flush.add(target)
                else:
                    self.since_flush.discard(target)

    def _check_page_is_fresh(self, slot: int, page: int) -> None:
        """Check that no plan in flight touches the page that ``slot`` is going to write."""
        if self.since_flush is not None:
            self.since_flush.add(page)
        mine = self.slots[slot].generation
        for plan in self.in_flight:
            for other, (generation, pages) in plan.touched.items():
                if (other, generation) != (slot, mine) and page in pages:
                    raise Violation(
                        "a page is reused only after all plans with it are acknowledged",
                        f"page {page}, plan {plan.number}",
                    )
        for other, open_slot in self.slots.items():
            if page in open_slot.pages:
                raise Violation("no page is held twice", f"page {page}, slots {other} and {slot}")

    # ---- the worker's messages

    def on_receive(self, message: wire.Message) -> None:
        """Check ``message``, which the engine takes next."""
        if isinstance(message, wire.StepResult):
            plan = self.in_flight.popleft()
            self.places.answered(self.index, plan.rows)
            self.num_unanswered -= 1
            self.num_steps += 1
            self.steps_of_worker += 1
            tokens = wire.ints(message.tokens).tolist()
            self.num_tokens += len(tokens)
            offsets = wire.ints(message.offsets).tolist()
            touched = plan.touched.items()
            for row, (slot, (generation, _)), (start, stop) in zip(
                plan.rows, touched, itertools.pairwise(offsets), strict=True
            ):
                self.turns.sampled(row, stop - start)
                self.places.sampled(row, stop - start)
                is_open = slot in self.slots and self.slots[slot].generation == generation
                if is_open and stop > start:
                    self.slots[slot].has_output = True
            self.note(f"result {message.number}: {tokens}")
        elif isinstance(message, wire.Failure):
            self.note(f"failure {message.number}: {message.message}, slot {message.slot}")
            self.num_unanswered -= 1
            self.num_failures += 1
            self.is_failing |= message.fatal
            self.on_fault()
            for plan in self.in_flight:
                if plan.number == message.number:
                    # The worker refuses all plans that it has, until it is told to reset.
                    self.places.forget(self.index)
                    self._suspect(plan.rows)
                    named = dict(zip(plan.touched, plan.rows, strict=True)).get(message.slot)
                    self.places.possible_culprits |= set() if named is None else {named[0]}
        elif isinstance(message, wire.Reply):
            self.note(f"reply {message.number}: {message.error or 'fine'}")
            self.calls.pop(message.number, None)


def _pairs(*columns: bytes) -> list[tuple[int, int]]:
    first, second = (wire.ints(column).tolist() for column in columns)
    return list(zip(first, second, strict=True))


@attrs.define(eq=False)
class CheckedLink:
    """The engine's end of a link, with checks by :class:`MessageChecker`.

    Each message of the engine takes ``delay`` seconds.
    """

    _link: Link
    _checker: MessageChecker
    _delay: float

    async def send(self, message: wire.Message) -> None:
        """Send ``message`` through the link."""
        with self._checker.reporting():
            self._checker.on_send(message)
            self._checker.after_step()
        if self._delay:
            await trio.sleep(self._delay)
        await self._link.send(message)

    async def receive(self) -> wire.Message:
        """Return the next message from the link."""
        with self._checker.reporting():
            self._checker.after_step()
        try:
            message = await self._link.receive()
        except WorkerLost:
            self._checker.note("the link is closed")
            raise
        with self._checker.reporting():
            self._checker.on_receive(message)
        return message
