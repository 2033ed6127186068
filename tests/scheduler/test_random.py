"""The scheduler's state machine, driven at random against a strict fake worker."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.scheduling import (
    ABORT,
    MAX_STEPS,
    Bench,
    make_limits,
    make_request,
    reference,
    reference_beams,
    reference_logprobs,
    sometimes_nothing,
)
from trioserve.protocol import wire
from trioserve.protocol.errors import ContextTooLong, InvalidRequest, WorkerLost
from trioserve.requests.request import FinishReason, Request, Sequence, SequenceOutput, State
from trioserve.testing import FakeWorker
from trioserve.testing.fake_model import draw, fake_logprobs
from trioserve.testing.simulation.scenario import num_accepted

prompts = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 20).map(lambda length: [1] * length),
)


VOCAB = 12
UNLUCKY = 2
"""The seed of sequences that may come to where there is no token to draw."""

logprobs_wanted = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "prompt_logprobs": st.integers(0, 3),
            "prompt_logprobs_start": st.integers(0, 8),
            "logprobs": st.sampled_from([None, 0, 2]),
            "logprob_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        }
    ),
)


beams_wanted = st.one_of(
    st.just({}),
    st.just({}),
    st.fixed_dictionaries(
        {
            "beam_width": st.integers(1, 4),
            "length_penalty": st.sampled_from([0.0, 1.0, -1.0]),
            "early_stopping": st.sampled_from([False, True, "never"]),
        }
    ),
)


class CoreMachine(RuleBasedStateMachine):
    """Requests, aborts, plans, late results, failures and deaths in any order.

    At the end every sequence has exactly the tokens of the unbatched reference, or a prefix of
    them if it was ended early. The log-probabilities of a prompt were there before any token.
    """

    @initialize(
        fake=st.builds(
            FakeWorker,
            num_pages=st.integers(6, 16),
            num_host_pages=st.sampled_from([0, 1, 3, 8, 30]),
            page_size=st.integers(1, 3),
            vocab_size=st.just(VOCAB),
            token=st.just(sometimes_nothing(VOCAB, UNLUCKY)),
            max_num_seqs=st.integers(1, 5),
            max_num_batched_tokens=st.integers(1, 12),
            computes_past_stop=st.booleans(),
            max_row_tokens=st.sampled_from([1, 1, 2, 5]),
            accepted=st.just(num_accepted),
            num_stages=st.sampled_from([1, 1, 2, 3]),
        ),
        limits=st.fixed_dictionaries(
            {
                "max_plans_in_flight": st.integers(1, 4),
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "scheduling_policy": st.sampled_from(["fcfs", "lpm", "priority"]),
                "capacity_policy": st.sampled_from(["max_utilization", "guaranteed_no_evict"]),
            }
        ),
    )
    def start(self, fake: FakeWorker, limits: dict[str, Any]) -> None:
        self.options = limits
        self.bench = Bench.make(fake, **limits)
        self.requests: list[Request] = []
        self.ends: collections.Counter[int] = collections.Counter()
        self.delivered: dict[int, list[int]] = collections.defaultdict(list)

    def note(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = id(output.sequence)
            assert not self.ends[key], "something came after the end"
            self.check_asked(output)
            self.delivered[key] += output.token_ids
            self.ends[key] += output.finish is not None
            request = output.sequence.request
            finished = output.finish is not None and output.finish.reason is FinishReason.LENGTH
            if request.prompt_logprobs is not None and (output.token_ids or finished):
                assert request.prompt_logprobs.stop >= len(request.prompt_ids), "not complete"

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(0, 15)),
        stop=st.lists(st.integers(0, VOCAB - 1), max_size=1),
        seed=st.integers(0, UNLUCKY),
        n=st.sampled_from([1, 1, 2, 4]),
        logprobs=logprobs_wanted,
        allowed=st.sampled_from([None, None, [3, 5, 7]]),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "salt"]),
        tenant=st.sampled_from(["", "a", "b"]),
        beams=beams_wanted,
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        logprobs: dict[str, Any],
        allowed: list[int] | None,
        beams: dict[str, Any],
        **options: Any,
    ) -> None:
        if beams:
            options["n"] = min(options["n"], beams["beam_width"])
        request = make_request(
            prompt, max_tokens=max_tokens, allowed_token_ids=allowed, **options, **logprobs, **beams
        )
        try:
            self.bench.core.submit(request, 0.0)
        except ContextTooLong:
            pool = self.bench.worker.num_pages * self.bench.worker.page_size
            assert (len(prompt) + (max_tokens or 1)) * beams.get("beam_width", 1) > pool
        except InvalidRequest as error:
            if error.param == "beam_width":
                most = self.bench.worker.max_num_seqs, self.bench.worker.max_num_batched_tokens
                assert beams["beam_width"] > min(most)
            else:
                assert logprobs["prompt_logprobs_start"] > len(prompt)
        else:
            self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(data.draw(st.sampled_from(self.requests)).sequences))
        if sequence.request.beams is not None:
            return  # its outputs end together
        output = self.bench.core.abort(sequence, ABORT)
        assert (output is None) == (self.ends[id(sequence)] > 0)
        self.note([] if output is None else [output])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Abort every output of a request, in any order, as leaving the caller's scope does."""
        request = data.draw(st.sampled_from(self.requests))
        for sequence in data.draw(st.permutations(request.sequences)):
            output = self.bench.core.abort(sequence, ABORT)
            self.note([] if output is None else [output])
            self.bench.core.check_integrity()

    @rule(times=st.integers(1, 3))
    def plan(self, times: int) -> None:
        for _ in range(times):
            self.bench.plan()

    @precondition(lambda self: self.bench.results)
    @rule()
    def result(self) -> None:
        self.note(self.bench.result())

    @rule(steps=st.integers(1, 10))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.note(self.bench.step())

    @rule(killed=st.booleans())
    def worker_dies(self, killed: bool) -> None:
        self.bench.core.recovery.on_worker_lost()
        self.bench.core.check_integrity()
        outputs, _ = self.bench.core.recovery.judge(WorkerLost("no luck", from_outside=killed))
        self.note(outputs)
        self.bench.core.check_integrity()
        self.bench.results.clear()
        old = self.bench.worker
        self.bench.worker = FakeWorker(
            **{
                field.name: getattr(old, field.name)
                for field in attrs.fields(FakeWorker)
                if field.init
            }
        )
        self.note(self.bench.core.recovery.restart(make_limits(self.bench.worker, **self.options)))

    @precondition(lambda self: self.bench.core.in_flight)
    @rule()
    def plan_fails(self) -> None:
        """Fail the oldest plan in flight on the worker."""
        oldest = self.bench.core.in_flight[0]
        # The others of a real worker's plans would be refused; this one has run them, and forgets.
        self.bench.results.clear()
        failure = wire.Failure(number=oldest.number, message="no luck")
        try:
            self.note(self.bench.core.recovery.on_failure(failure))
        except WorkerLost:
            self.worker_dies(killed=False)
        else:
            self.bench.worker.reset(wire.Reset(next_plan=self.bench.core.next_number))

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "bench"):
            return
        core = self.bench.core
        core.check_integrity()
        if core.limits.capacity_policy == "guaranteed_no_evict":
            assert core.counters.num_preemptions == 0
        for sequence in itertools.chain.from_iterable(r.sequences for r in self.requests):
            if sequence.request.beams is None or self.ends[id(sequence)]:
                assert self.delivered[id(sequence)] == sequence.output_ids or was_aborted(sequence)
            assert (sequence.state is State.FINISHED) == self.ends[id(sequence)]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        for _ in range(MAX_STEPS):
            if bench.plan() is None and not bench.results:
                break
            self.note(bench.step())
        else:
            raise AssertionError("the sequences don't come to an end")
        self.sound()
        statistics = bench.core.statistics()
        assert statistics.pages_free + statistics.pages_cached == statistics.pages_total
        assert bench.worker.slots == {}
        for request in self.requests:
            for sequence in request.sequences:
                self.check_end(sequence)
            if request.prompt_logprobs is not None:
                self.check_logprobs(request)

    def check_asked(self, output: SequenceOutput) -> None:
        """Check the log-probabilities of named tokens against the output delivered so far."""
        request = output.sequence.request
        assert len(output.logprobs or ()) in (0, len(output.token_ids))
        assert output.logprobs is not None or not output.token_ids or not request.params.logprobs
        before = request.prompt_ids + self.delivered[id(output.sequence)]
        for place, entry in enumerate(output.logprobs or ()):
            context = [*before, *output.token_ids[:place]]
            expected = fake_logprobs(context, VOCAB)[list(request.params.logprob_token_ids)]
            assert [logprob for _, logprob, _ in entry.asked] == expected.tolist()

    def check_beam(self, sequence: Sequence) -> None:
        request, finish = sequence.request, sequence.finish
        assert finish is not None
        expected = reference_beams(self.bench.worker, request, sequence.max_tokens)
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tuple(sequence.output_ids) == expected[sequence.index].tokens
            assert finish.beam_logprob == float(expected[sequence.index].total)
        elif isinstance(finish.error, InvalidRequest):
            assert len(expected) < request.params.n
            assert finish.error.param == "n"

    def check_end(self, sequence: Sequence) -> None:
        if sequence.request.beams is not None and sequence.max_tokens:
            assert self.ends[id(sequence)] == 1
            self.check_beam(sequence)
            return
        expected = reference(self.bench.worker, sequence)
        assert self.ends[id(sequence)] == 1
        assert sequence.finish is not None
        if sequence.finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert sequence.output_ids == expected
            return
        assert sequence.output_ids == expected[: len(sequence.output_ids)]
        masked = isinstance(sequence.finish.error, InvalidRequest)
        if masked or "NaN" in str(sequence.finish.error):
            assert masked == (sequence.request.params.allowed_token_ids is not None)
            groups = sequence.request.sequences
            assert any(self.has_nothing_next(sibling) for sibling in groups)
            # An error before the first token ends all; a later one ends its output alone.
            empty = (sibling for sibling in groups if not sibling.output_ids)
            assert len({sibling.finish for sibling in empty if ended_by_error(sibling)}) <= 1

    def has_nothing_next(self, sequence: Sequence) -> bool:
        context = sequence.request.prompt_ids + sequence.output_ids
        return draw(self.bench.worker.token, context, sequence.sampler) < 0

    def check_logprobs(self, request: Request) -> None:
        """Check a prompt's log-probabilities: all must be there if any sequence ended well.

        A leader that is aborted in flight may leave a part missing.
        """
        assert request.prompt_logprobs is not None
        expected = reference_logprobs(self.bench.worker, request)
        entries = request.prompt_logprobs.entries(request.prompt_ids)
        assert entries == expected[: len(entries)]
        ends = [each.finish.reason for each in request.sequences if each.finish is not None]
        if FinishReason.LENGTH in ends or FinishReason.STOP in ends:
            assert entries == expected


def was_aborted(sequence: Sequence) -> bool:
    """Return True for an aborted beam, which had tokens that nothing is delivered of."""
    is_beam = sequence.request.beams is not None
    ends = (FinishReason.STOP, FinishReason.LENGTH)
    return is_beam and sequence.finish is not None and sequence.finish.reason not in ends


def ended_by_error(sequence: Sequence) -> bool:
    return sequence.finish is not None and sequence.finish.reason is FinishReason.ERROR


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
