"""The scheduler's state: the place of every sequence, and the transitions between places.

A sequence waits (in the queue, or held back for its leader), runs, is preempted, or has finished.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import attrs

from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput, State
from trioserve.requests.tenants import TenantCounts
from trioserve.scheduler.adapter_residency import Residency
from trioserve.scheduler.cache_events import adapter_word
from trioserve.scheduler.decode_hold import DecodeHold
from trioserve.scheduler.disk_pages import DiskIndex
from trioserve.scheduler.fault_isolation import FaultIsolation
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.limits import SchedulerLimits
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.pause_gate import PauseGate
from trioserve.scheduler.plan_builder import InFlight, PlanBuilder
from trioserve.scheduler.sequence_group import SequenceGroups
from trioserve.scheduler.sequence_state import Running, SequenceState
from trioserve.scheduler.step_time import StepTimeModel
from trioserve.scheduler.waiting_queue import WaitingQueue


class SchedulerState:
    """The sequences, the memory and the plans in flight of one scheduler.

    ``now`` is in seconds on trio's clock.
    """

    def __init__(self, limits: SchedulerLimits, feeds: Feeds) -> None:
        self.limits = limits
        self.feeds = feeds
        self.disk_index = DiskIndex(feeds.disk_folders)
        """Pages on disk, which outlive the worker's memory."""
        self.memory = Memory(limits, feeds, self.disk_index)
        self.waiting = WaitingQueue()
        self.groups = SequenceGroups(self.waiting)
        """Sequences that wait for the pages of their request's prompt."""
        self.running = Running()
        self.preempted: list[SequenceState] = []
        """Preempted sequences that a plan in flight still names; the others are queued again."""
        self.leaving: dict[Request, None] = {}
        """Requests that another worker goes on with, once all their prompts are computed."""
        self.chunks: list[SequenceState] = []
        """Sequences of such requests with tokens of their prompts in the latest plan."""
        self.in_flight: deque[InFlight] = deque()
        self.residency = Residency(limits.max_cpu_loras, limits.max_loras)
        """Adapters that the worker holds."""
        self.uncompiled: dict[Grammar, None] = {}
        """Grammars that the worker still has to compile. Sequences that follow one of them wait."""
        self.pause_gate = PauseGate()
        """Pauses, which keep sequences from being computed."""
        self.counters = self.feeds.counters
        self.next_number = 1
        """Number of the next plan."""
        self.num_waiting_tokens = 0
        """Tokens, prompt and output so far, of all sequences that wait for a slot."""
        self.num_waiting_cached = 0
        """Waiting tokens that the prefix cache had when their requests were placed."""
        self.waiting_of_tenants = TenantCounts()
        """Sequences that wait for a slot and their tokens, by tenant."""
        self.has_worker = True
        self.num_taken_in = 0
        """Number of requests that came from other workers."""
        self.num_arrivals = 0
        """Number of requests ever submitted, which is the newest request's arrival number."""
        self.step_times = StepTimeModel()
        """Model of the time of the worker's steps."""
        self.decode_hold = DecodeHold()
        """Holds of decodes while a burst of prompts is computed."""
        self.now = 0.0
        """Time of the last call that gave one."""
        self.fault_isolation = FaultIsolation()
        """Suspects of a worker's death, which restrict the sequences to compute."""

    # ---- waiting

    def enqueue(self, seq_state: SequenceState) -> None:
        """Queue the sequence, or hold it back for its leader's prompt."""
        self.move(seq_state.sequence, State.WAITING)
        self.count_waiting(seq_state.sequence, 1)
        self.groups.enter(seq_state)

    def count_waiting(self, sequence: Sequence, sign: int) -> None:
        """Count a sequence that begins (1) or ceases (-1) to wait for a slot."""
        num_tokens = sign * sequence.num_tokens
        self.num_waiting_tokens += num_tokens
        self.num_waiting_cached += sign * sequence.request.num_cached_when_placed
        self.waiting_of_tenants.add(sequence.request.tenant, sign, num_tokens)
        self.feeds.note_load()

    def move(self, sequence: Sequence, state: State) -> None:
        """Move ``sequence`` to ``state``, and note when a preempted one does."""
        sequence.move_to(state)
        sequence.note_history(self.now)

    def admit(self, seq_state: SequenceState) -> None:
        """Move a waiting sequence, which has got a slot and pages, to the running ones."""
        self.waiting.admit(seq_state, self.running)
        self.count_waiting(seq_state.sequence, -1)
        self.running.add(seq_state)
        self.move(seq_state.sequence, State.PREFILL)

    def restart(
        self, seq_state: SequenceState, output_ids: list[int], sibling: SequenceState
    ) -> None:
        """Queue a sequence of a beam search with another output; it runs or is held back.

        It has the turn of its ``sibling``, so that searches have one order among them.
        """
        if seq_state.holds_slot:
            self.hold_back(seq_state)
        self.groups.remove(seq_state)
        self.count_waiting(seq_state.sequence, -1)
        seq_state.sequence.output_ids = output_ids
        priority, _, arrival, index = seq_state.order
        seq_state.order = (priority, sibling.order[1], arrival, index)
        self.count_waiting(seq_state.sequence, 1)
        self.waiting.add(seq_state)

    def hold_back(self, seq_state: SequenceState) -> None:
        """Take slot and pages from a sequence that no plan in flight names, and hold it back."""
        self.leave(seq_state)
        self.move(seq_state.sequence, State.PREEMPTED)
        self.move(seq_state.sequence, State.WAITING)
        self.count_waiting(seq_state.sequence, 1)
        self.groups.hold_back(seq_state)

    # ---- leaving

    def preempt(self, seq_state: SequenceState) -> None:
        """Preempt a sequence: take its slot and pages. It resumes from its tokens."""
        self.leave(seq_state)
        self.mark_preempted(seq_state)
        self.requeue_preempted()

    def mark_preempted(self, seq_state: SequenceState) -> None:
        """Note a sequence that has left its slot; it is queued again once no plan names it."""
        seq_state.left_grammar = True
        self.move(seq_state.sequence, State.PREEMPTED)
        self.preempted.append(seq_state)

    def retract_running(self) -> None:
        """Preempt all running sequences; they resume from their tokens."""
        for seq_state in list(self.running):
            self.preempt(seq_state)

    def requeue_preempted(self) -> None:
        """Queue the preempted sequences that no plan in flight names any more."""
        oldest = self.in_flight[0].number if self.in_flight else self.next_number
        for seq_state in [each for each in self.preempted if each.last_plan < oldest]:
            self.preempted.remove(seq_state)
            self.enqueue(seq_state)

    def leave(self, seq_state: SequenceState) -> None:
        """Take slot and pages from a running sequence."""
        self.running.remove(seq_state)
        self.memory.leave(seq_state)
        self.feeds.note_load()

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End ``sequence``, which hasn't finished, and free what it holds."""
        if sequence.state in (State.PREFILL, State.DECODE):
            self.leave(sequence.seq_state)
        elif sequence.state is State.WAITING:
            queue = self.groups if sequence.seq_state.is_held else self.waiting
            queue.remove(sequence.seq_state)
            self.count_waiting(sequence, -1)
        elif sequence.state is State.PREEMPTED:
            self.preempted.remove(sequence.seq_state)
        sequence.seq_state = None
        sequence.finish = finish
        sequence.move_to(State.FINISHED)
        self.fault_isolation.forget(sequence)
        self.groups.on_finished(sequence.request)
        request = sequence.request
        if request.ended:
            self.leaving.pop(request, None)
        if request.spare_sequences and request.ended:
            for spare in request.spare_sequences:
                if spare.state is not State.FINISHED:
                    self.finish(spare, finish)

    def finish_all(self, request: Request, finish: Finish) -> list[SequenceOutput]:
        """End every unfinished sequence of ``request`` at once."""
        alive = [sequence for sequence in request.sequences if sequence.state is not State.FINISHED]
        # The last first, so that none of them becomes the leader on the way.
        for sequence in reversed(alive):
            self.finish(sequence, finish)
        return [end_of(each, finish) for each in alive]

    # ---- observation

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot, including those held back for a leader's prompt."""
        return len(self.waiting) + len(self.groups)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that have not finished, in any state."""
        return self.num_waiting + len(self.running) + len(self.preempted)

    @property
    def is_drained(self) -> bool:
        """True if the worker has nothing to do and has been told of every closed slot."""
        return not self.in_flight and not self.memory.slots.num_unclosed

    def num_unfinished_until(self, arrival: int) -> int:
        """Return the number of unfinished sequences that arrived no later than ``arrival``."""
        return sum(each.arrival <= arrival for each in self._unfinished())

    def has_adapter_users(self, number: int) -> bool:
        """Return True if an unfinished sequence uses that adapter."""
        return any(each.sequence.request.adapter == number for each in self._unfinished())

    def forget_adapter(self, number: int) -> None:
        """Forget an adapter that no sequence uses any more, and its cached prefixes."""
        self.residency.forget(number)
        self.memory.prefix.drop(lambda namespace: namespace[1:2] == (adapter_word(number),))

    def adapters_in_use(self) -> tuple[set[int], set[int]]:
        """Return the adapters of running and of waiting sequences; 0 stands for none."""
        waiting = itertools.chain(self.waiting, self.groups, self.preempted)
        return _adapters_of(self.running), _adapters_of(waiting)

    def running_adapters(self) -> set[int]:
        """Return the worker's adapters of running sequences, 0 included if one has none."""
        return {each.adapter for each in self.running}

    def requests_waiting_for(self, grammar: Grammar) -> list[Request]:
        """Return the requests that follow ``grammar`` and have a sequence without a slot."""
        waiting = (each.sequence for each in self._unfinished() if not each.holds_slot)
        return list(
            dict.fromkeys(each.request for each in waiting if each.sampler.grammar == grammar)
        )

    def await_compiling(self) -> None:
        """Make all sequences with a grammar wait until the worker has compiled it again."""
        grammars = (each.sequence.sampler.grammar for each in self._unfinished())
        self.uncompiled = {grammar: None for grammar in grammars if grammar is not None}

    def on_compiled(self, grammar: Grammar) -> None:
        """Let the sequences that follow ``grammar`` be computed: the worker has compiled it."""
        del self.uncompiled[grammar]
        for each in self._unfinished():
            if each.sequence.sampler.grammar == grammar:
                each.left_grammar = False

    def _unfinished(self) -> Iterator[SequenceState]:
        queues = (self.waiting, self.groups, self.running, self.preempted)
        return itertools.chain.from_iterable(queues)

    def statistics(self) -> SchedulerStatistics:
        """Return a snapshot."""
        pool = self.memory.pool
        return SchedulerStatistics(
            **attrs.asdict(self.counters),
            num_waiting=self.num_waiting,
            num_running=len(self.running),
            plans_in_flight=len(self.in_flight),
            pages_free=pool.num_free,
            pages_cached=pool.num_idle,
            pages_held=pool.num_held,
            pages_total=pool.num_pages,
            host_pages_cached=pool.host.num_stored,
            host_pages_total=pool.num_host_pages,
            disk_pages=len(self.disk_index.keys),
        )


def has_room(state: SchedulerState, builder: PlanBuilder) -> bool:
    """Return True if one more sequence may run: a slot is free, and a token is left for it.

    There are never more running sequences than tokens in a plan, so that all can decode.
    """
    most = state.limits.max_num_batched_tokens
    has_slot = state.memory.slots.num_free > 0
    return builder.may_open and has_slot and len(state.running) < most


def end_of(sequence: Sequence, finish: Finish) -> SequenceOutput:
    """Return the output of a sequence that ends without another token."""
    logprobs = None if sequence.request.params.logprobs is None else ()
    return SequenceOutput(sequence, logprobs=logprobs, finish=finish)


def _adapters_of(seq_states: Iterable[SequenceState]) -> set[int]:
    return {each.sequence.request.adapter for each in seq_states}
