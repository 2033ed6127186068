"""A worker without a model, whose pages hold tokens.

:class:`FakeWorker` takes the same plans as the real worker. A function of yours computes each next
token from all tokens before it. The worker is strict: a plan that breaks the rules of
:mod:`trioserve.protocol.wire` raises. In place of keys and values its pages hold the tokens
themselves, each with a digest of all tokens before it. A token is computed only from the pages in
the sequence's block table, so a page that was reused too early, shared wrongly or never computed
fails the test. Log-probabilities are functions of the tokens, too (:func:`fake_logprobs`).

This runs the scheduler alone on such a worker. All waiting uses trio's clock::

    scheduler = Scheduler(EngineConfig("fake"))
    schedulers = Schedulers([scheduler])
    engine_side, worker_side = memory_link_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_fake, FakeWorker(step_time=0.01), worker_side)
        nursery.start_soon(schedulers.run, requests, outputs)
        nursery.start_soon(scheduler.attach, engine_side, FakeWorker().ready())
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence, Sized
from typing import Any

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.protocol import wire
from trioserve.testing.fake_disk import FakeDisk
from trioserve.testing.fake_faults import Script, StepFails, WorkerDies
from trioserve.testing.fake_model import (
    EMBEDDING_WIDTH,
    KV_SHAPE,
    TokenFunction,
    adapter_shift,
    draw,
    fake_logprob,
    fake_logprobs,
    hashed_token,
    top_logprobs,
)
from trioserve.testing.fake_pages import FakePages
from trioserve.testing.fake_reports import HIDDEN_SIZE, FakeReport, FakeSlot

Accepted = Callable[[list[int]], int]
"""Function that returns the number of drafted tokens accepted after a context."""


@attrs.define(eq=False, kw_only=True)
class FakeWorker:
    """A worker with a function as its model. It turns plans into results, without a task or clock.

    Args:
        num_pages, num_host_pages: Pages on the device, and in the host's memory.
        disk: Pages on disk.
        page_size, vocab_size, max_model_len, max_num_seqs, max_num_batched_tokens: As in ``Ready``.
        max_row_tokens, num_stages: As in ``Ready``. Stages don't compute side by side here.
        token: Returns the next token (default: :func:`hashed_token`), -1 for none. If
            ``allowed_token_ids`` excludes the token, an allowed one takes its place.
        step_time: Seconds that :func:`serve_fake` takes for a step, or a function of the plan.
        computes_past_stop: True if a row after a stop id gives a token. Real workers do either.
        accepted: Returns the number of a row's drafted tokens that are accepted (default: 0).
            Places of rejected tokens hold a token that no sequence has.
        script: Called before each step; may raise :class:`WorkerDies` or :class:`StepFails`.
        max_loras: Most adapters in one plan.
        max_cpu_loras: Most loaded adapters. Any path is an adapter unless its last part begins with
            ``bad`` or ``missing``. An adapter adds :func:`adapter_shift` to each token.
        calls: Functions of their arguments that answer calls, by name; ``prepare`` needs none.
        call_time: Seconds that :func:`serve_fake` takes for a call, beside the steps, or a function
            of the call.
        calls_in_turn: True if steps and other calls wait for a call. A call may then end the worker
            (:class:`WorkerDies`).
    """

    num_pages: int = 256
    num_host_pages: int = 0
    disk: FakeDisk = attrs.field(factory=FakeDisk)
    page_size: int = 16
    vocab_size: int = 256
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_loras: int = 8
    max_cpu_loras: int = 32
    token: TokenFunction = attrs.field(
        default=attrs.Factory(lambda self: hashed_token(self.vocab_size), takes_self=True)
    )
    step_time: float | Callable[[wire.Plan], float] = 0.0
    computes_past_stop: bool = False
    max_row_tokens: int = 1
    num_stages: int = 1
    accepted: Accepted = lambda _context: 0
    script: Script = lambda _step, _plan: None
    calls: dict[str, Callable[[Any], Any]] = attrs.field(factory=dict)
    call_time: float | Callable[[wire.Call], float] = 0.0
    calls_in_turn: bool = False
    num_steps: int = attrs.field(init=False, default=0)
    weights: str = attrs.field(init=False, default="")
    """Name of the weights, which pages depend on, and tokens don't."""
    slots: dict[int, FakeSlot] = attrs.field(init=False, factory=dict)
    adapters: dict[int, str] = attrs.field(init=False, factory=dict)
    """Folders of the loaded adapters, by number."""
    _next_plan: int = attrs.field(init=False, default=1)
    _failed: bool = attrs.field(init=False, default=False)
    _dropped: dict[tuple[int, int], int] = attrs.field(init=False, factory=dict)
    _pages: FakePages = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._pages = FakePages(self.num_pages, self.num_host_pages, self.page_size)

    def ready(self, **changes: Any) -> wire.Ready:
        """Return this worker's ``Ready`` message, with ``changes`` of its fields."""
        ready = wire.Ready(
            model_checksum="",
            device="cpu",
            device_name="fake",
            computing="nothing",
            dtype="float32",
            num_pages=self.num_pages,
            page_size=self.page_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_host_pages=self.num_host_pages,
            max_row_tokens=self.max_row_tokens,
            num_stages=self.num_stages,
            embedding_width=EMBEDDING_WIDTH,
            kv_shape=list(KV_SHAPE),
            hidden_size=HIDDEN_SIZE,
        )
        return attrs.evolve(ready, **changes)

    def reset(self, message: wire.Reset) -> None:
        """Forget every slot, and accept plans again."""
        self.slots.clear()
        self._dropped.clear()
        self._failed = False
        self._next_plan = message.next_plan

    def drop(self, message: wire.Drop) -> None:
        """Stop computing for a slot after a plan, whether it is open or a later plan opens it."""
        self._dropped[message.slot, message.generation] = message.plan

    def step(self, plan: wire.Plan) -> wire.StepResult | wire.Failure:
        """Run a plan and return its result, or a failure if the script raises :class:`StepFails`.

        Raises:
            WorkerDies: The script raised it.
            AssertionError: The plan breaks a rule.
        """
        if self._failed:
            return wire.Failure(number=plan.number, message="an earlier plan failed")
        assert plan.number == self._next_plan, f"plan {plan.number}, not {self._next_plan}"
        self._next_plan += 1
        try:
            self.script(self.num_steps, plan)
        except StepFails as failure:
            self._failed = True
            return wire.Failure(
                number=plan.number, message=str(failure), slot=failure.slot, fatal=failure.fatal
            )
        self._apply(plan)
        rows = list(zip(_list(plan.row_slots), _list(plan.row_counts), strict=True))
        assert len({slot for slot, _ in rows}) == len(rows), "a slot has two rows"
        assert sum(count for _, count in rows) <= self.max_num_batched_tokens, "too many tokens"
        longer = [count > 1 for _, count in rows]
        assert longer == sorted(longer), "rows of one token don't come first"
        computing = [(self.slots[slot], count) for slot, count in rows]
        reports = [FakeReport.of(self.slots[slot], slot, n, self.vocab_size) for slot, n in rows]
        drafted = [max(each.computed + n - len(each.tokens), 0) for each, n in computing]
        given = [self._compute(slot, count) for slot, count in computing]
        self.num_steps += 1
        result = self._result(plan, given)
        return attrs.evolve(
            result,
            drafted=wire.from_ints(drafted) if any(drafted) else b"",
            prompts=[each.prompt for each in reports if each.prompt is not None],
            pooled=[each.pooled for each in reports if each.pooled is not None],
            tensors=[piece for each in reports for piece in each.tensors],
        )

    def _apply(self, plan: wire.Plan) -> None:
        own = set(_list(plan.copies)[1::2])
        for number in _list(plan.closed):
            own.update(self.slots.pop(number).pages)
        self._pages.copy(wire.ints(plan.copies).reshape(-1, 2))
        for opened in plan.opened:
            assert 0 <= opened.slot < self.max_num_seqs, f"there is no slot {opened.slot}"
            assert opened.slot not in self.slots, f"slot {opened.slot} is opened twice"
            if opened.prefix:
                own.add(_list(opened.pages)[opened.computed // self.page_size])
            self._pages.check_begun(_list(opened.pages), opened.computed, own)
            slot = self.slots[opened.slot] = FakeSlot(
                generation=opened.generation,
                tokens=self._pages.tokens_of(opened, self._origin(opened.adapter)),
                prompt_length=opened.prompt_length,
                computed=opened.computed,
                pages=_list(opened.pages),
                sampler=opened.sampler,
                adapter=opened.adapter,
                prompt_logprobs_from=opened.prompt_logprobs_from,
                states_from=opened.states_from,
                context_logits_from=opened.context_logits_from,
            )
            if opened.prefix:
                self._check_pages_written(slot, opened.prefix[0].start, opened.computed)
            assert slot.adapter == 0 or slot.adapter in self.adapters, "there is no such adapter"
            assert 0 <= slot.computed < len(slot.tokens), "nothing is left to compute"
            assert 0 < slot.prompt_length <= len(slot.tokens)
            if slot.prompt_logprobs_from != -1:
                assert opened.sampler.prompt_logprobs >= 0, "no row asked for log-probabilities"
                assert slot.computed < slot.prompt_logprobs_from < slot.prompt_length
            for first in (slot.states_from, slot.context_logits_from):
                assert first == -1 or first >= slot.computed, "rows are wanted of cached tokens"
        for number, slot in self.slots.items():
            last = self._dropped.get((number, slot.generation), plan.number)
            slot.stopped |= last < plan.number
        used = {slot.adapter for slot in self.slots.values()} - {0}
        assert len(used) <= self.max_loras, "a plan has too many adapters"
        for number, num_pages in wire.ints(plan.cuts).reshape(-1, 2).tolist():
            del self.slots[number].pages[num_pages:]
        for number, page in zip(_list(plan.page_slots), _list(plan.page_ids), strict=True):
            self.slots[number].pages.append(page)

    def _compute(self, slot: FakeSlot, count: int) -> list[int]:
        """Compute the next ``count`` tokens of ``slot``, and sample after its last one.

        Tokens past those that the slot holds are drafted. Sampling goes on while they are accepted.
        """
        assert count > 0, "a row of no tokens"
        if slot.stopped and not self.computes_past_stop:
            return []
        start, stop = slot.computed, slot.computed + count
        assert stop <= self.max_model_len, "a sequence is longer than the model allows"
        self._check_pages_written(slot, start, stop)
        num_known = len(slot.tokens)
        if stop <= num_known:
            return self._advance(slot, stop)
        assert count <= self.max_row_tokens, "more tokens are to be computed than there are"
        assert start == num_known - 1 >= slot.prompt_length, "tokens are drafted too early"
        # The places of accepted tokens are written again below.
        self._pages.forget(self._pages.places(slot.pages, stop)[num_known:])
        accepted = min(self.accepted(slot.tokens), stop - num_known)
        given = self._advance(slot, num_known)
        for _ in range(accepted):
            if given[-1] < 0 or (slot.stopped and not self.computes_past_stop):
                break
            given += self._advance(slot, slot.computed + 1)
        return given

    def _advance(self, slot: FakeSlot, stop: int) -> list[int]:
        """Compute the tokens of ``slot`` before ``stop``; sample the next one if these are all."""
        start = slot.computed
        places = self._pages.places(slot.pages, stop)
        self._pages.write(slot.tokens[start:stop], places, self._origin(slot.adapter))
        slot.computed = stop
        if stop < len(slot.tokens):
            return []
        assert slot.adapter == 0 or slot.adapter in self.adapters, "its adapter was unloaded"
        context = self._pages.read(places, self._origin(slot.adapter))
        assert context == slot.tokens, "a page holds other tokens than its sequence"
        token = draw(self.token, context, slot.sampler, self.vocab_size)
        if slot.adapter and token >= 0:
            token = (token + adapter_shift(self.adapters[slot.adapter])) % self.vocab_size
        slot.tokens.append(token)
        num_output = len(slot.tokens) - slot.prompt_length
        slot.stopped = slot.stopped or token < 0 or slot.sampler.is_stop(token, num_output)
        return [token]

    def _check_pages_written(self, slot: FakeSlot, start: int, stop: int) -> None:
        written = set(slot.pages[start // self.page_size : -(-stop // self.page_size)])
        assert all(0 <= page < self.num_pages for page in slot.pages), "there is no such page"
        assert len(slot.pages) * self.page_size >= stop, "a sequence runs past its pages"
        for other in self.slots.values():
            if other is not slot:
                assert written.isdisjoint(other.pages), "a page of another sequence is written"

    def _result(self, plan: wire.Plan, given: list[list[int]]) -> wire.StepResult:
        slots = [self.slots[number] for number in _list(plan.row_slots)]
        logprobs: list[float] = []
        top: list[list[tuple[int, float]]] = []
        asked: list[npt.NDArray[np.float32]] = []
        for slot, tokens in zip(slots, given, strict=True):
            num_top, ids = slot.sampler.logprobs, slot.sampler.logprob_token_ids
            for place, token in enumerate(tokens, len(slot.tokens) - len(tokens)):
                context = slot.tokens[:place]
                logprobs.append(math.nan if num_top < 0 else fake_logprob(token, 0))
                top.append(top_logprobs(context, token, slot.sampler, self.vocab_size))
                asked.append(fake_logprobs(context, self.vocab_size)[ids])
        return wire.StepResult(
            number=plan.number,
            slots=plan.row_slots,
            generations=wire.from_ints([slot.generation for slot in slots]),
            offsets=_offsets(given),
            tokens=wire.from_ints(list(itertools.chain(*given))),
            logprobs=wire.from_floats(logprobs),
            top_offsets=_offsets(top) if any(top) else b"",
            top_ids=wire.from_ints([token for ids in top for token, _ in ids]),
            top_logprobs=wire.from_floats([logprob for ids in top for _, logprob in ids]),
            ids_offsets=_offsets(asked) if any(map(len, asked)) else b"",
            ids_logprobs=wire.from_floats(np.concatenate(asked)) if asked else b"",
            step_us=round(self.seconds_for(plan) * 1e6),
        )

    def seconds_for(self, plan: wire.Plan) -> float:
        """Return the duration of the step of ``plan``, in seconds."""
        return self.step_time(plan) if callable(self.step_time) else self.step_time

    def seconds_for_call(self, call: wire.Call) -> float:
        """Return the duration of ``call``, in seconds."""
        return self.call_time(call) if callable(self.call_time) else self.call_time

    def _origin(self, adapter: int) -> np.uint64:
        """Return the initial digest of a sequence, which depends on weights and adapter."""
        return np.uint64(zlib.crc32(self.weights.encode()) | adapter << 48)

    def swap_weights(self, weights: str) -> None:
        """Compute with ``weights`` from the next step on."""
        assert not self.slots, "weights are swapped while a sequence is open"
        self.weights = weights

    def _load_adapter(self, arguments: dict[str, Any]) -> dict[str, Any]:
        path, name = arguments["path"], arguments["path"].rpartition("/")[2]
        if name.startswith(("bad", "missing")):
            return {"error": f"{path} is bad", "missing": name.startswith("missing")}
        assert len(self.adapters) < self.max_cpu_loras, "too many adapters are loaded"
        self.adapters[arguments["number"]] = path
        return {"checksum": name, "rank": 8}

    def answer(self, call: wire.Call) -> wire.Reply:
        """Answer a call, by ``calls`` or like a worker that succeeds."""
        known: dict[str, Callable[[Any], Any]] = {
            "ping": lambda arguments: arguments,
            "prepare": lambda _: None,
            "read_weights": lambda path: f"checksum of {path}",
            "swap_weights": self.swap_weights,
            "discard_weights": lambda _: None,
            "load_adapter": self._load_adapter,
            "unload_adapter": self.adapters.pop,
            **self.disk.calls(self.weights, self._pages),
            **self.calls,
        }
        function = known.get(call.name)
        if function is None:
            return wire.Reply(number=call.number, error=f"there is no call {call.name!r}")
        try:
            result = function(msgspec.msgpack.decode(call.arguments))
        except WorkerDies:
            raise
        except Exception as error:
            return wire.Reply(number=call.number, error=str(error))
        return wire.Reply(number=call.number, result=msgspec.msgpack.encode(result))


def _offsets(rows: Sequence[Sized]) -> bytes:
    return wire.from_ints([0, *itertools.accumulate(map(len, rows))])


def _list(column: bytes) -> list[int]:
    values: list[int] = wire.ints(column).tolist()
    return values
