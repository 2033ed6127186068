"""Does the simulation bite? Plants faults that other servers have had, and shows each one found.

``python -m tests.faults.planted``. Each fault is a few lines put over the engine's own, in the same
place and with the same effect as in the report that is named. Seeds are run until an invariant
doesn't hold. The exit status is 1 if a fault isn't found.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest import mock

import attrs
import msgspec
import numpy as np
import trio

from trioserve.engine.engine import Engine
from trioserve.engine.lifecycle import OpenGenerations
from trioserve.engine.request_factory import RequestMaker
from trioserve.engine.routing import placement
from trioserve.engine.routing.placement import Placement
from trioserve.engine.schedulers import Schedulers
from trioserve.engine.sessions.session import Session
from trioserve.protocol.errors import RequestAborted, WorkerLost
from trioserve.requests.generation import GenerationStream
from trioserve.requests.request import (
    Finish,
    FinishReason,
    Request,
    Sequence,
    SequenceOutput,
    State,
)
from trioserve.requests.stream import Chunk
from trioserve.scheduler import (
    drafts,
    handing_over,
    planning,
    result_processing,
    scheduler,
    sequence_state,
)
from trioserve.scheduler.adapter_residency import Residency
from trioserve.scheduler.beams import BeamGroup, Beams
from trioserve.scheduler.host_pages import HostPages
from trioserve.scheduler.memory import Memory
from trioserve.scheduler.moving import Moving
from trioserve.scheduler.page_lending import Lending, Lent
from trioserve.scheduler.page_pool import PagePool
from trioserve.scheduler.prefix_cache import PrefixCache
from trioserve.scheduler.recovery import Recovery
from trioserve.scheduler.result_processing import ResultProcessor
from trioserve.scheduler.result_validation import Results
from trioserve.scheduler.scheduler import Scheduler
from trioserve.scheduler.sequence_state import SequenceState
from trioserve.scheduler.slots import SlotAllocator
from trioserve.scheduler.state import SchedulerState
from trioserve.scheduler.token_counts import TokenCounts
from trioserve.testing.simulation import Report, draw_scenario, run_scenario
from trioserve.testing.simulation.draw import FIRST_BEAMS, FIRST_CLUSTERS
from trioserve.testing.simulation.draw_workers import FIRST_RAGGED
from trioserve.text.detokenizer import Detokenizer
from trioserve.workers.supervisor import Supervisor

Plant = Callable[[], contextlib.AbstractContextManager[Any]]


UNREPORTED = "none known"
"""Origin of a fault that no issue is known of."""


@attrs.frozen
class PlantedFault:
    """A fault, and the issue of another project that reports it, if one is known.

    Seeds before ``first_seed`` have nothing that it could harm.
    """

    name: str
    origin: str
    plant: Plant
    first_seed: int = 0


@attrs.frozen
class Find:
    """The search for a fault; ``report`` is that of the seed that found it."""

    fault: PlantedFault
    num_seeds: int
    seconds: float
    report: Report | None


FAULTS: list[PlantedFault] = []


def plants(
    name: str, origin: str, owner: object, attribute: str, first_seed: int = 0
) -> Callable[[Any], Any]:
    """Note a fault: the function makes it of a method, or of a module's function."""

    def note(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def plant() -> contextlib.AbstractContextManager[Any]:
            return mock.patch.object(owner, attribute, make(getattr(owner, attribute)))

        FAULTS.append(PlantedFault(name, origin, plant, first_seed))
        return make

    return note


@plants(
    "an abort is lost during a batch's transition", "sgl-project/sglang#36876", Scheduler, "abort"
)
def _abort_in_transition(original: Any) -> Any:
    """Lose an abort of a sequence in the newest plan, between queue and batch."""

    def abort(self: Scheduler, sequence: Sequence, finish: Finish) -> None:
        seq_state = sequence.seq_state
        just_planned = (
            sequence.state is State.PREFILL
            and self._core is not None
            and seq_state.last_plan == self._core.next_number - 1
        )
        if not just_planned:
            original(self, sequence, finish)

    return abort


@plants(
    "a page is reused before its step is acknowledged",
    "vllm-project/vllm#45357",
    PagePool,
    "release",
)
def _released_at_once(original: Any) -> Any:
    """Free pages as soon as no sequence holds them, whatever is in flight."""
    return lambda self, pages, epoch: original(self, pages, 0)


@plants(
    "a slot is reused before its step is acknowledged",
    "vllm-project/vllm#32255",
    SlotAllocator,
    "close",
)
def _closed_at_once(original: Any) -> Any:
    """Free a slot as soon as its sequence has left, whatever is in flight."""
    return lambda self, slot, epoch: original(self, slot, 0)


@plants("the parent of n > 1 is leaked", "vllm-project/vllm#51629", OpenGenerations, "_abandon")
def _parent_kept(original: Any) -> Any:
    """Keep the parent of several outputs after an abort."""

    def abandon(self: OpenGenerations, request: Request) -> None:
        aborted = not all(sequence.delivered for sequence in request.sequences)
        original(self, request)
        if aborted and len(request.sequences) > 1:
            self._requests[request] = None

    return abandon


@plants(
    "the stop string comes after the final chunk", "vllm-project/vllm#57052", Detokenizer, "_close"
)
def _stop_string_behind(original: Any) -> Any:
    """Send the text that matched behind the final chunk."""

    def close(self: Any, sequence: Sequence, finish: Finish, error: Exception | None) -> None:
        if isinstance(finish.stop_reason, str):
            rest = Chunk(finish.stop_reason, index=sequence.index)
            sequence.request.stream.push(rest)
        original(self, sequence, finish, error)

    return close


@plants(
    "waiting requests are forgotten on a restart",
    "a710128/nanovllm-voxcpm#84",
    Recovery,
    "on_worker_lost",
)
def _waiting_forgotten(original: Any) -> Any:
    """Put back the running sequences on a restart, and forget the waiting ones."""

    def on_worker_lost(self: Recovery) -> None:
        core = self._state
        for seq_state in core.waiting.take_all():
            core.num_waiting_tokens -= seq_state.sequence.num_tokens
        original(self)

    return on_worker_lost


@plants(
    "the preempted lose their place in the queue",
    "vllm-project/vllm#45388",
    SchedulerState,
    "preempt",
)
def _preempted_last(original: Any) -> Any:
    """Move a preempted sequence to the end of the queue."""

    def preempt(self: SchedulerState, seq_state: SequenceState) -> None:
        first, *rest = seq_state.order
        seq_state.order = (first + (1 << 40), *rest)
        original(self, seq_state)

    return preempt


@plants("a page is freed twice", "vllm-project/vllm#33377", Memory, "leave")
def _released_twice(original: Any) -> Any:
    """Give the last page back on an abort and at the end of the step."""

    def leave(self: Memory, seq_state: SequenceState) -> None:
        last = seq_state.pages[-1:]
        epoch = seq_state.last_plan
        original(self, seq_state)
        if not self.pool.holders(last[0]) and not self.pool.is_kept(last[0]):
            self.pool._free.append(last[0])
            self.pool._epochs[last[0]] = epoch

    return leave


@plants(
    "a rejected request's stream is kept", "sgl-project/sglang#40360", OpenGenerations, "_abandon"
)
def _stream_kept_on_reject(original: Any) -> Any:
    """Keep a request that is rejected after it was noted."""

    def abandon(self: OpenGenerations, request: Request) -> None:
        original(self, request)
        if request.rejection is not None:
            self._requests[request] = None

    return abandon


@plants(
    "aborted outputs aren't flushed at a shutdown", "vllm-project/vllm#36964", Engine, "abort_all"
)
def _abort_not_flushed(original: Any) -> Any:
    """Drop the last chunk of requests that the server ends."""

    def abort_all(self: Engine, error: RequestAborted) -> None:
        finish = Finish(FinishReason.ABORT, error=error)
        with mock.patch.object(Scheduler, "_deliver"):
            for request in self._open:
                for sequence in request.sequences:
                    self._backend.abort(sequence, finish)

    return abort_all


class _DeafEvent:
    """An event whose waiters can't be cancelled."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self.is_set, self.set = self._event.is_set, self._event.set

    async def wait(self) -> None:
        with trio.CancelScope(shield=True):
            await self._event.wait()


@plants(
    "a deadline is forgotten while a request is prepared",
    "sgl-project/sglang#6931",
    RequestMaker,
    "make",
)
def _deadline_forgotten(original: Any) -> Any:
    """Ignore a request's deadline until it is queued."""

    def make(self: RequestMaker, *args: Any, **fields: Any) -> Request:
        request: Request = original(self, *args, **fields)
        request.admitted = _DeafEvent()  # type: ignore[assignment]
        return request

    return make


@plants("computing goes on after a stop string", "vllm-project/vllm#10806", Detokenizer, "__init__")
def _stop_not_told(original: Any) -> Any:
    """Don't tell the scheduler of a stop string."""

    def init(self: Any, tokenizer: Any, abort: Any, on_delivered: Any) -> None:
        def silent(sequence: Sequence, finish: Finish) -> None:
            if finish.reason is not FinishReason.STOP:
                abort(sequence, finish)

        original(self, tokenizer, silent, on_delivered)

    return init


@plants("a worker's death isn't noticed", "sgl-project/sglang#18421", Supervisor, "run")
def _death_unnoticed(original: Any) -> Any:
    """Don't wait for the worker's end: its requests hang."""

    async def run(self: Any, attach: Any, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        async def attach_for_ever(link: Any, ready: Any) -> None:
            try:
                await attach(link, ready)
            except WorkerLost:
                await trio.sleep_forever()

        await original(self, attach_for_ever, task_status)

    return run


@plants("tokens come twice after a preemption", "vllm-project/vllm#15996", ResultProcessor, "take")
def _resumed_without_output(original: Any) -> Any:
    """Begin again with the prompt after a preemption: tokens come twice."""

    def take(self: ResultProcessor, *args: Any) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = original(self, *args)
        if self._state.counters.num_preemptions:
            outputs = [
                msgspec.structs.replace(output, token_ids=output.token_ids * 2)
                for output in outputs
            ]
        return outputs

    return take


@plants(
    "a prefix is computed by each request that has it",
    "vllm-project/vllm#9643",
    PrefixCache,
    "match",
)
def _not_awaited(original: Any) -> Any:
    """Don't wait for a prefix that is being computed."""
    return lambda self, *args: attrs.evolve(original(self, *args), pending=False)


@plants(
    "a page on the host is given away before it is read",
    "sgl-project/sglang#26728",
    PrefixCache,
    "pin",
)
def _not_pinned(original: Any) -> Any:
    """Don't pin pages on the host that are about to be read."""
    return lambda self, nodes: None


@plants(
    "copies to the host and back are done out of order",
    "NVIDIA/TensorRT-LLM#9056",
    PrefixCache,
    "take_copies",
)
def _loads_first(original: Any) -> Any:
    """Copy onto the device before copying from it, whatever the order was."""

    def take_copies(self: PrefixCache) -> list[tuple[int, int]]:
        copies: list[tuple[int, int]] = original(self)
        return sorted(copies, key=lambda copy: not self.pool.is_on_host(copy[0]))

    return take_copies


@plants(
    "a page is given away on the host while it is written to the disk",
    "sgl-project/sglang#26728",
    HostPages,
    "free",
)
def _not_locked(original: Any) -> Any:
    """Free a place although a transfer reads it."""

    def free(self: HostPages, place: int) -> None:
        original(self, place)
        if place in self._left:
            self._left.remove(place)
            self._free.append(place)

    return free


@plants(
    "a turn that is cut off takes its session's history with it",
    "sgl-project/sglang#36475",
    Session,
    "_turn",
)
def _history_lost(original: Any) -> Any:
    """Forget a session's history when a client leaves."""

    @contextlib.asynccontextmanager
    async def turn(self: Session, start: Any, generation: Any) -> AsyncIterator[GenerationStream]:
        stream: GenerationStream | None = None
        try:
            async with original(self, start, generation) as stream:
                yield stream
        finally:
            if stream is None or not stream.is_complete:
                self._forget(list(self._turns))

    return turn


@plants(
    "an adapter is unloaded while requests run with it",
    "huggingface/trl#7017",
    SchedulerState,
    "has_adapter_users",
)
def _leaves_at_once(original: Any) -> Any:
    """Unload an adapter that is in use."""
    return lambda self, number: False


@plants("an unloaded adapter stays in the worker", "vllm-project/vllm#54839", Residency, "forget")
def _kept_by_the_worker(original: Any) -> Any:
    """Keep an unloaded adapter in the worker."""

    def forget(self: Residency, number: int) -> None:
        original(self, number)
        self.known.add(number)

    return forget


@plants(
    "a prefix of one adapter is found by another's requests",
    "ggml-org/llama.cpp#26207",
    sequence_state,
    "namespace_of",
)
def _prefixes_of_all_adapters(original: Any) -> Any:
    """Find what was computed with one adapter by requests with another."""
    return lambda salt, adapter: (salt,)


@plants(
    "a new worker doesn't get the adapters of the one before",
    "vllm-project/aibrix#236",
    Residency,
    "on_worker_lost",
)
def _not_loaded_again(original: Any) -> Any:
    """Take a new worker to hold what the one before it held."""
    return lambda self: None


@plants(
    "drafts after a stop token are part of the output",
    "LostRuins/koboldcpp#1276",
    *(result_processing, "_append", FIRST_RAGGED),
)
def _drafts_after_a_stop(original: Any) -> Any:
    """Append all accepted tokens of a row, though one of them ends the sequence."""

    def append(sequence: Sequence, tokens: list[int]) -> Any:
        accepted = [token for token in tokens if token >= 0]
        sequence.output_ids.extend(accepted)
        return tuple(accepted), None

    return append


@plants(
    "a rejected draft counts as computed",
    "Sudharsanselvaraj/Token-Print#110",
    *(TokenCounts, "settle", FIRST_RAGGED),
)
def _rejected_counts(original: Any) -> Any:
    """Keep a rejected token in the cache."""

    def settle(self: TokenCounts, slots: Any, extra: Any) -> None:
        original(self, slots, extra)
        self.computed[slots] += 1

    return settle


@plants(
    "drafts have no room in the cache",
    "turboderp-org/exllamav2#274",
    *(drafts, "_grow", FIRST_RAGGED),
)
def _drafts_without_pages(original: Any) -> Any:
    """Append no pages for drafts."""
    return lambda seq_state, extra, builder, memory: extra


@plants(
    "a row is planned before it is known how many drafts were accepted",
    "vllm-project/vllm#52071",
    *(planning, "plan_drafts", FIRST_RAGGED),
)
def _planned_too_early(original: Any) -> Any:
    """Take the length of a sequence for known while its drafts are in flight."""

    def plan_drafts(builder: Any, memory: Memory, max_row_tokens: int) -> None:
        original(builder, memory, max_row_tokens)
        memory.counts.unsettled[:] = False

    return plan_drafts


@plants(
    "log-probabilities are those of a row's first token",
    "vllm-project/vllm#33391",
    *(Results, "logprob", FIRST_RAGGED),
)
def _logprobs_of_the_first(original: Any) -> Any:
    """Select the log-probabilities of accepted tokens by the row alone."""

    def logprob(self: Results, index: int, params: Any) -> Any:
        row = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return original(self, int(self.offsets[row]), params)

    return logprob


@plants(
    "a fork's last page isn't copied",
    "xLLM-AI/xllm#1984",
    *(Memory, "enter", FIRST_BEAMS),
)
def _fork_without_a_copy(original: Any) -> Any:
    """Give a fork a page for the last tokens of its beam, without their content."""

    def enter(self: Memory, seq_state: Any, match: Any, copied_from: Any = None) -> None:
        before = list(self.prefix.copies)
        original(self, seq_state, match, copied_from)
        if copied_from is not None:
            self.prefix.copies[:] = before

    return enter


@plants(
    "beams write to the page that they share",
    "ggml-org/llama.cpp#3802",
    *(Memory, "enter", FIRST_BEAMS),
)
def _fork_shares_the_last_page(original: Any) -> Any:
    """Let a fork go on in the last page of the beam that it continues."""

    def enter(self: Memory, seq_state: Any, match: Any, copied_from: Any = None) -> None:
        original(self, seq_state, match, copied_from)
        if copied_from is not None and seq_state.computed % self.limits.page_size:
            seq_state.pages[-1] = copied_from.pages[len(seq_state.pages) - 1]

    return enter


@plants(
    "a beam goes on with another token than the worker's cache",
    "huggingface/transformers#46612",
    *(Beams, "_go_on", FIRST_BEAMS),
)
def _goes_on_untold(original: Any) -> Any:
    """Don't tell the worker that a beam goes on with another token than it has drawn."""
    return lambda self, sequence, token, drawn: original(self, sequence, token, token)


@plants(
    "a beam that has lost its slot counts with its old continuations",
    "xLLM-AI/xllm#1984",
    *(BeamGroup, "waits", FIRST_BEAMS),
)
def _old_continuations(original: Any) -> Any:
    """Choose among continuations of a slot that the beam has left."""
    return lambda self, sequence: sequence in self._found and sequence.seq_state.holds_slot


@plants(
    "a request that moves stays where it was, too",
    UNREPORTED,
    *(scheduler, "take_out", FIRST_CLUSTERS),
)
def _resumed_twice(original: Any) -> Any:
    """Compute a request of a lost worker elsewhere, and on that worker's successor as well."""
    return lambda state, request: Moving(request, {}, set())


@plants(
    "a request that moves goes on one token too early",
    "ai-dynamo/dynamo#7930",
    *(scheduler, "take_in", FIRST_CLUSTERS),
)
def _one_token_too_early(original: Any) -> Any:
    """Forget the last token of each output that moves."""

    def take_in(state: SchedulerState, moving: Moving) -> None:
        for sequence in moving.request.sequences:
            del sequence.output_ids[-1:]
        original(state, moving)

    return take_in


@plants(
    "pages are freed on another worker",
    UNREPORTED,
    *(Schedulers, "for_request", FIRST_CLUSTERS),
)
def _freed_elsewhere(original: Any) -> Any:
    """End all requests on the first worker, wherever they are computed."""
    return lambda self, request: self[0]


@plants(
    "a removed worker still gets requests",
    "vllm-project/vllm#55772",
    *(Placement, "_remove", FIRST_CLUSTERS),
)
def _kept_among_the_workers(original: Any) -> Any:
    """Keep a worker in the router's picture when it has been removed."""
    return lambda self, scheduler: None


@plants(
    "a request that ends workers is tried on one after the other",
    "sgl-project/sglang#7028",
    *(placement, "movable", FIRST_CLUSTERS),
)
def _suspects_move(original: Any) -> Any:
    """Let requests move that may have ended their worker."""

    def movable(state: Any) -> list[Request]:
        innocent = mock.Mock(suspects=[])
        with mock.patch.object(state, "fault_isolation", innocent):
            requests: list[Request] = original(state)
        return requests

    return movable


@plants(
    "pages are given away while another worker reads them",
    UNREPORTED,
    *(Lending, "begin", FIRST_CLUSTERS),
)
def _not_held(original: Any) -> Any:
    """Lend pages without holding them."""

    def begin(self: Lending, nodes: Any) -> Lent:
        lent: Lent = original(self, nodes)
        self.end(lent)
        return attrs.evolve(lent, held=[], locked=[])

    return begin


@plants(
    "another page than the one that was asked for is handed over",
    "vllm-project/vllm#52617",
    *(Lending, "begin", FIRST_CLUSTERS),
)
def _in_wrong_order(original: Any) -> Any:
    """Write the pages of a prompt in the wrong order."""

    def begin(self: Lending, nodes: Any) -> Lent:
        lent: Lent = original(self, nodes)
        return attrs.evolve(lent, pages=lent.pages[::-1])

    return begin


@plants(
    "a request is handed over while a row of it is computed",
    UNREPORTED,
    *(handing_over, "_is_ready", FIRST_CLUSTERS),
)
def _too_early(original: Any) -> Any:
    """Hand requests over as soon as a plan has the last of their prompts."""
    return lambda state, request: True


def find(fault: PlantedFault, *, most_seeds: int = 3000) -> Find:
    """Run seeds with ``fault`` in place until an invariant doesn't hold."""
    started = time.monotonic()
    with fault.plant():
        for index in range(most_seeds):
            report = run_scenario(draw_scenario(fault.first_seed + index))
            if report.violation is not None:
                return Find(fault, index + 1, time.monotonic() - started, report)
    return Find(fault, most_seeds, time.monotonic() - started, None)


def _row(find: Find) -> str:
    violation = None if find.report is None else find.report.violation
    told = "NOT FOUND" if violation is None else violation.invariant
    fault = find.fault
    return f"| {fault.name} | {fault.origin} | {find.num_seeds} | {find.seconds:.2f} | {told} |"


def main(arguments: list[str]) -> int:
    """Plant each fault in turn and print a table; 1 if one isn't found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.planted", description=__doc__)
    parser.add_argument("--most-seeds", type=int, default=3000, help="to try for each fault")
    options = parser.parse_args(arguments)
    print("| fault | reported as | found at seed no. | seconds | what told |")
    print("|---|---|---|---|---|")
    finds = []
    for fault in FAULTS:
        finds.append(find(fault, most_seeds=options.most_seeds))
        print(_row(finds[-1]), flush=True)
    return 0 if all(each.report is not None for each in finds) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
