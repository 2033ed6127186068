"""Two plans in flight: the runner and the worker's loop over a device that answers later."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pynng
import pytest
import torch

from gpu.executor import NO_COPIES, Copies
from gpu.kernels.device import KernelLaunchError
from gpu.runner import Runner
from gpu.sampling.drawn import DeviceTimes, Drawn
from gpu.slots import PlanError, Row, Slot, SlotTable
from gpu.worker import QuitRequested, Worker
from tests.support.plans import PlanMaker
from trioserve.protocol import wire
from trioserve.protocol.sampling import SamplerParams

SECONDS = 120


@attrs.define
class DeferredExecutor:
    """Draws ``100 * slot + position`` for every row, once :meth:`complete` lets a step end.

    Like a GPU it doesn't look at the tokens on the host, of which the last may be unknown, but for
    the slots in ``needing``: it draws their last token and 1, and defers a step till that is known.
    """

    completions: int = attrs.field(factory=lambda: os.eventfd(0, os.EFD_SEMAPHORE))
    unusable: set[tuple[int, int]] = attrs.field(factory=set)
    opened: list[int] = attrs.field(factory=list)
    closed: list[int] = attrs.field(factory=list)
    submitted: list[list[tuple[int, int, int]]] = attrs.field(factory=list)
    needing: set[int] = attrs.field(factory=set)
    begun: list[str] = attrs.field(factory=list)
    error: Exception | None = None
    sampling_error: Exception | None = None

    def open(self, slot: Slot) -> None:
        self.opened.append(slot.number)

    def close(self, number: int) -> None:
        self.closed.append(number)

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> DeferredSubmission:
        if self.error is not None:
            raise self.error
        self.submitted.append([(row.slot.number, row.start, row.count) for row in rows])
        self.begun.append("forward")
        submission = DeferredSubmission(self, [row for row in rows if row.samples])
        waits = (row.slot for row in submission.rows if row.slot.number in self.needing)
        if all(slot.tokens[-1] >= 0 for slot in waits):
            submission.sample()
        return submission

    def draw(self, row: Row) -> int:
        if (row.slot.number, row.end) in self.unusable:
            return -1
        if row.slot.number in self.needing:
            return int(row.slot.tokens[-1]) + 1
        return 100 * row.slot.number + row.end

    def complete(self, steps: int = 1) -> None:
        """Let so many more steps end."""
        os.eventfd_write(self.completions, steps)


@attrs.define
class DeferredSubmission:
    executor: DeferredExecutor
    rows: list[Row]
    tokens: list[int] | None = None

    @property
    def deferred(self) -> bool:
        return self.tokens is None

    def sample(self) -> None:
        if self.executor.sampling_error is not None:
            raise self.executor.sampling_error
        self.executor.begun.append("draw")
        self.tokens = [self.executor.draw(row) for row in self.rows]

    def wait(self) -> Drawn:
        assert self.tokens is not None
        os.eventfd_read(self.executor.completions)
        return Drawn(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=None,
            top=None,
            times=DeviceTimes(step_us=5, idle_us=3),
        )


@pytest.fixture
def executor() -> Iterator[DeferredExecutor]:
    executor = DeferredExecutor()
    yield executor
    os.close(executor.completions)


@pytest.fixture
def runner(executor: DeferredExecutor) -> Runner:
    slots = SlotTable(num_pages=64, page_size=4, max_model_len=256, vocab_size=1000)
    return Runner(executor, slots, max_num_batched_tokens=64)


@pytest.fixture
def maker() -> PlanMaker:
    def no_step(_: wire.Plan) -> wire.StepResult:
        raise AssertionError("these tests submit and finish")

    return PlanMaker(no_step)


def fail(_: object) -> Drawn:
    """Instead of :meth:`DeferredSubmission.wait`, where the device has failed."""
    raise RuntimeError("the device is gone")


def given(result: wire.StepResult) -> list[list[int]]:
    offsets, tokens = wire.ints(result.offsets).tolist(), wire.ints(result.tokens).tolist()
    return [tokens[begin:end] for begin, end in itertools.pairwise(offsets)]


class TestRunner:
    def test_a_plan_behind_one_whose_tokens_are_unknown(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(2, [1, 2, 3])
        runner.submit(maker.plan({2: 3}))
        runner.submit(maker.plan({2: 1}))
        assert runner.num_pending == 2
        assert runner.slots[2].tokens.tolist() == [1, 2, 3, -1, -1]
        executor.complete(2)
        assert given(runner.finish()) == [[203]]
        assert runner.slots[2].tokens.tolist() == [1, 2, 3, 203, -1]
        runner.submit(maker.plan({2: 1}))
        result = runner.finish()
        assert (given(result), result.step_us, result.idle_us) == ([[204]], 5, 3)
        executor.complete()
        assert given(runner.finish()) == [[205]]
        assert executor.submitted == [[(2, 0, 3)], [(2, 3, 1)], [(2, 4, 1)]]

    def test_what_is_computed_behind_a_stop_gives_nothing(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(0, [1, 2], SamplerParams(stop_ids=[3]))
        maker.open(1, [1, 2])
        runner.submit(maker.plan({0: 2, 1: 2}))
        runner.submit(maker.plan({0: 1, 1: 1}))
        executor.complete(2)
        assert given(runner.finish()) == [[2], [102]]
        runner.submit(maker.plan({0: 1, 1: 1}))
        executor.complete(1)
        assert given(runner.finish()) == [[3], [103]]
        assert given(runner.finish()) == [[], [104]]

    def test_a_slot_closed_while_its_token_is_on_the_way(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(0, [1, 2])
        runner.submit(maker.plan({0: 2}))
        maker.close(0)
        maker.open(0, [7, 8, 9, 10])
        runner.submit(maker.plan({0: 4}))
        executor.complete(2)
        assert given(runner.finish()) == [[2]]
        assert given(runner.finish()) == [[4]]
        assert runner.slots[0].tokens.tolist() == [7, 8, 9, 10, 4]
        assert executor.opened == [0, 0]

    def test_a_row_without_a_token_is_its_own_affair(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        executor.unusable.add((1, 3))
        maker.open(1, [1, 2, 3])
        maker.open(2, [1, 2])
        runner.submit(maker.plan({1: 3, 2: 2}))
        runner.submit(maker.plan({1: 1, 2: 1}))
        executor.complete(3)
        assert given(runner.finish()) == [[-1], [202]]
        assert given(runner.finish()) == [[], [203]]
        runner.submit(maker.plan({1: 1, 2: 1}))
        assert given(runner.finish()) == [[], [204]]
        assert executor.submitted[-1] == [(2, 3, 1)]

    def test_a_step_that_fails_spoils_the_one_behind_it(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2, 3])
        runner.submit(maker.plan({1: 3}))
        runner.submit(maker.plan({1: 1}))
        executor.complete(2)
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(RuntimeError, match="the device is gone"),
        ):
            patch.setattr(DeferredSubmission, "wait", fail)
            runner.finish()
        with pytest.raises(PlanError, match="the plan before this one failed"):
            runner.finish()
        with pytest.raises(PlanError, match="no Reset has come"):
            runner.submit(maker.plan({}))
        runner.reset(9)
        assert runner.num_pending == len(runner.slots) == 0
        assert executor.closed == [1]

    def test_a_plan_that_is_refused_leaves_the_one_before_it(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2, 3])
        runner.submit(maker.plan({1: 3}))
        with pytest.raises(PlanError, match="slot 7 is to be closed"):
            runner.submit(wire.Plan(number=2, closed=wire.from_ints([7])))
        executor.complete()
        assert given(runner.finish()) == [[103]]
        with pytest.raises(PlanError, match="no Reset has come"):
            runner.submit(maker.plan({}))

    def test_reset_waits_for_what_is_on_the_device(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2, 3])
        runner.submit(maker.plan({1: 3}))
        runner.submit(maker.plan({1: 1}))
        executor.complete(2)
        runner.reset(1)
        with pytest.raises(BlockingIOError):
            os.set_blocking(executor.completions, False)
            os.eventfd_read(executor.completions)

    def test_reset_closes_all_slots_whatever_one_of_them_says(
        self,
        executor: DeferredExecutor,
        runner: Runner,
        maker: PlanMaker,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def close(number: int) -> None:
            executor.closed.append(number)
            raise PlanError("a logits processor failed", number)

        monkeypatch.setattr(DeferredExecutor, "close", lambda _, number: close(number))
        for slot in (1, 2):
            maker.open(slot, [1, 2, 3])
        runner.submit(maker.plan({1: 3, 2: 3}))
        executor.complete()
        runner.reset(1)
        assert (executor.closed, len(runner.slots)) == ([1, 2], 0)
        assert caplog.messages == [f"slot {slot}: a logits processor failed" for slot in (1, 2)]


class TestDeferredDraws:
    """Slot 2 needs its last token before the next can be drawn."""

    @pytest.fixture(autouse=True)
    def needing(self, executor: DeferredExecutor, maker: PlanMaker) -> None:
        executor.needing.add(2)
        maker.open(2, [1, 2, 3])

    def test_they_begin_when_the_step_before_is_finished(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2])
        both = {2: 1, 1: 1}
        runner.submit(maker.plan({2: 3, 1: 2}))
        assert runner.accepts
        runner.submit(maker.plan(both))
        assert not runner.accepts
        assert executor.begun == ["forward", "draw", "forward"]
        executor.complete(3)
        assert given(runner.finish()) == [[4], [102]]
        assert executor.begun == ["forward", "draw", "forward", "draw"]
        assert runner.accepts
        assert runner.slots[2].tokens.tolist() == [1, 2, 3, 4, -1]
        runner.submit(maker.plan(both))
        assert given(runner.finish()) == [[5], [103]]
        assert given(runner.finish()) == [[6], [104]]
        assert runner.slots[2].tokens.tolist() == [1, 2, 3, 4, 5, 6]

    def test_they_wait_for_all_plans_before_them(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2])
        runner.submit(maker.plan({1: 2}))
        runner.submit(maker.plan({2: 3, 1: 1}))
        runner.submit(maker.plan({2: 1, 1: 1}))
        executor.complete(3)
        assert given(runner.finish()) == [[102]]
        assert not runner.accepts
        assert executor.begun == ["forward", "draw"] * 2 + ["forward"]
        assert given(runner.finish()) == [[4], [103]]
        assert runner.accepts
        assert given(runner.finish()) == [[5], [104]]

    def test_a_step_without_such_rows_goes_ahead(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        maker.open(1, [1, 2])
        runner.submit(maker.plan({2: 3, 1: 2}))
        runner.submit(maker.plan({1: 1}))
        assert runner.accepts
        executor.complete(3)
        assert given(runner.finish()) == [[4], [102]]
        runner.submit(maker.plan({2: 1}))  # its token has been known for a step
        assert executor.begun == ["forward", "draw"] * 3
        assert [given(runner.finish()) for _ in range(2)] == [[[103]], [[5]]]

    def test_a_row_that_has_stopped_is_drawn_for_nothing(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        executor.needing.add(3)
        maker.open(3, [1, 2, 3], SamplerParams(stop_ids=[4]))
        runner.submit(maker.plan({3: 3}))
        runner.submit(maker.plan({3: 1}))
        assert not runner.accepts
        executor.complete(2)
        assert given(runner.finish()) == [[4]]
        assert given(runner.finish()) == [[]]

    def test_an_error_is_that_of_the_plan_whose_draws_they_are(
        self, executor: DeferredExecutor, runner: Runner, maker: PlanMaker
    ) -> None:
        runner.submit(maker.plan({2: 3}))
        runner.submit(maker.plan({2: 1}))
        executor.sampling_error = ValueError("no mask")
        executor.complete()
        assert given(runner.finish()) == [[4]]
        assert not runner.accepts  # but no read blocks on its result
        with pytest.raises(ValueError, match="no mask"):
            runner.finish()
        with pytest.raises(PlanError, match="no Reset has come"):
            runner.submit(maker.plan({}))

    @pytest.mark.parametrize("finish", [False, True])
    def test_behind_a_step_that_fails_they_never_begin(
        self,
        executor: DeferredExecutor,
        runner: Runner,
        maker: PlanMaker,
        monkeypatch: pytest.MonkeyPatch,
        finish: bool,
    ) -> None:
        runner.submit(maker.plan({2: 3}))
        runner.submit(maker.plan({2: 1}))
        monkeypatch.setattr(DeferredSubmission, "wait", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            runner.finish()
        if finish:
            with pytest.raises(PlanError, match="the plan before this one failed"):
                runner.finish()
        monkeypatch.undo()
        runner.reset(1)
        assert (runner.accepts, runner.num_pending) == (True, 0)
        assert executor.begun == ["forward", "draw", "forward"]


class WorkerSocket(pynng.Pair0):
    """A runner that blocks reads until ``awaited`` messages have come."""

    awaited = 0
    received = 0

    def recv(self, block: bool = True) -> bytes:
        message: bytes = super().recv(block or self.received < self.awaited)
        self.received += 1
        return message


class TestWorker:
    """The worker's loop in a thread, and the engine's end of its socket here."""

    @pytest.fixture
    def sockets(self, tmp_path: Path, runner: Runner) -> Iterator[tuple[pynng.Pair0, WorkerSocket]]:
        url = f"ipc://{tmp_path}/worker.sock"
        milliseconds = SECONDS * 1000
        options = {"recv_timeout": milliseconds, "send_timeout": milliseconds}
        buffers = {"recv_buffer_size": 16, "send_buffer_size": 16}
        with (
            pynng.Pair0(listen=url, **options, **buffers) as engine,
            WorkerSocket(dial=url, block_on_dial=True, **options, **buffers) as end,
        ):

            def serve() -> None:
                with pytest.raises(QuitRequested):
                    Worker(end).serve(runner)

            thread = threading.Thread(target=serve)
            thread.start()
            yield engine, end
            engine.send(wire.encode(wire.Quit()))
            thread.join(SECONDS)
            assert not thread.is_alive()

    @pytest.fixture
    def socket(self, sockets: tuple[pynng.Pair0, WorkerSocket]) -> pynng.Pair0:
        return sockets[0]

    def test_plans_are_submitted_ahead_and_answered_in_order(
        self, socket: pynng.Pair0, executor: DeferredExecutor, maker: PlanMaker
    ) -> None:
        maker.open(2, [1, 2, 3])
        socket.send(wire.encode(maker.plan({2: 3})))
        socket.send(wire.encode(maker.plan({2: 1})))
        # The answer to a call shows that both plans were taken while neither had ended.
        socket.send(wire.encode(wire.Call(number=1, name="statistics", arguments=b"")))
        reply = wire.decode(socket.recv())
        assert isinstance(reply, wire.Reply)
        assert msgspec.msgpack.decode(reply.result)["steps"] == 0
        assert len(executor.submitted) == 2
        executor.complete()
        first = wire.decode(socket.recv())
        executor.complete()
        second = wire.decode(socket.recv())
        assert isinstance(first, wire.StepResult)
        assert isinstance(second, wire.StepResult)
        assert (first.number, given(first)) == (1, [[203]])
        assert (second.number, given(second)) == (2, [[204]])

    @pytest.mark.parametrize("ends_early", [False, True])
    def test_a_result_comes_before_the_next_plan_if_another_is_computed(
        self,
        sockets: tuple[pynng.Pair0, WorkerSocket],
        executor: DeferredExecutor,
        maker: PlanMaker,
        monkeypatch: pytest.MonkeyPatch,
        ends_early: bool,
    ) -> None:
        """The first step ends before or after the second is submitted, and a third waits."""
        socket, end = sockets
        end.awaited = 3
        submit, wait = DeferredExecutor.submit, DeferredSubmission.wait

        def ending(self: DeferredExecutor, *arguments: Any) -> DeferredSubmission:
            if len(self.submitted) == (0 if ends_early else 1):
                self.complete()
            return submit(self, *arguments)

        def noting(self: DeferredSubmission) -> Drawn:
            executor.begun.append("result")
            return wait(self)

        monkeypatch.setattr(DeferredExecutor, "submit", ending)
        monkeypatch.setattr(DeferredSubmission, "wait", noting)
        maker.open(2, [1, 2, 3])
        for count in (3, 1, 1):
            socket.send(wire.encode(maker.plan({2: count})))
        assert isinstance(wire.decode(socket.recv()), wire.StepResult)
        executor.complete(2)
        for _ in range(2):
            assert isinstance(wire.decode(socket.recv()), wire.StepResult)
        assert executor.begun[:6] == ["forward", "draw", "forward", "draw", "result", "forward"]

    def test_a_plan_waits_while_the_draws_of_the_one_before_are_deferred(
        self, socket: pynng.Pair0, executor: DeferredExecutor, maker: PlanMaker
    ) -> None:
        executor.needing.add(2)
        maker.open(2, [1, 2, 3])
        for rows in ({2: 3}, {2: 1}, {2: 1}, {2: 1}):
            socket.send(wire.encode(maker.plan(rows)))
        tokens = []
        for _ in range(4):
            executor.complete()
            result = wire.decode(socket.recv())
            assert isinstance(result, wire.StepResult)
            tokens += given(result)
        assert tokens == [[4], [5], [6], [7]]
        assert executor.begun == ["forward", "draw", *["forward", "draw"] * 3]

    def test_a_slot_that_is_dropped_while_its_plan_waits_is_not_computed(
        self,
        sockets: tuple[pynng.Pair0, WorkerSocket],
        executor: DeferredExecutor,
        maker: PlanMaker,
    ) -> None:
        socket, end = sockets
        end.awaited = 5
        executor.needing.add(2)
        maker.open(2, [1, 2, 3])
        socket.send(wire.encode(maker.plan({2: 3})))
        socket.send(wire.encode(maker.plan({2: 1})))  # is deferred, so the next one waits
        maker.open(5, [1, 2, 3, 4])
        socket.send(wire.encode(maker.plan({2: 1, 5: 4})))
        socket.send(wire.encode(wire.Drop(slot=5, generation=maker.generations[5], plan=2)))
        maker.close(5)
        maker.open(5, [6, 7])
        socket.send(wire.encode(maker.plan({2: 1, 5: 2})))
        tokens = []
        for _ in range(4):
            executor.complete()
            result = wire.decode(socket.recv())
            assert isinstance(result, wire.StepResult)
            tokens.append(given(result))
        assert tokens == [[[4]], [[5]], [[6], []], [[7], [502]]]
        assert executor.submitted[2] == [(2, 4, 1)]
        assert executor.submitted[3] == [(2, 5, 1), (5, 0, 2)]

    def test_a_plan_that_counts_as_running_is_computed_though_the_drop_is_there(
        self,
        sockets: tuple[pynng.Pair0, WorkerSocket],
        executor: DeferredExecutor,
        maker: PlanMaker,
    ) -> None:
        """Else a page that others find in the prefix cache would never have been computed."""
        socket, end = sockets
        end.awaited = 3
        maker.open(5, [1, 2, 3, 4])
        socket.send(wire.encode(maker.plan({5: 4})))
        socket.send(wire.encode(maker.plan({5: 1})))
        socket.send(wire.encode(wire.Drop(slot=5, generation=maker.generations[5], plan=1)))
        tokens = []
        for _ in range(2):
            executor.complete()
            result = wire.decode(socket.recv())
            assert isinstance(result, wire.StepResult)
            tokens.append(given(result))
        assert tokens == [[[]], [[]]]
        assert executor.submitted == [[(5, 0, 4)], []]

    def test_a_refused_plan_is_answered_after_the_one_before_it(
        self, socket: pynng.Pair0, executor: DeferredExecutor, maker: PlanMaker
    ) -> None:
        maker.open(2, [1, 2, 3])
        executor.complete()
        socket.send(wire.encode(maker.plan({2: 3})))
        socket.send(wire.encode(wire.Plan(number=2, closed=wire.from_ints([7]))))
        result, failure = wire.decode(socket.recv()), wire.decode(socket.recv())
        assert isinstance(result, wire.StepResult)
        assert isinstance(failure, wire.Failure)
        assert (result.number, failure.number, failure.slot) == (1, 2, 7)
        again = PlanMaker(lambda _: pytest.fail("these tests submit and finish"))
        again.open(5, [1, 2])
        socket.send(wire.encode(wire.Reset(next_plan=1)))
        socket.send(wire.encode(again.plan({5: 2})))
        executor.complete()
        result = wire.decode(socket.recv())
        assert isinstance(result, wire.StepResult)
        assert (result.number, given(result)) == (1, [[502]])

    @pytest.mark.parametrize(
        ("error", "fatal"),
        [
            (torch.AcceleratorError("CUDA error: an illegal memory access\nwas seen"), True),
            (KernelLaunchError("decode_attention over (8, 2, 1) blocks: refused"), True),
            (torch.OutOfMemoryError("CUDA out of memory."), False),
            (ValueError("any bug"), False),
        ],
    )
    def test_after_an_error_on_the_device_the_worker_can_not_go_on(
        self,
        socket: pynng.Pair0,
        executor: DeferredExecutor,
        maker: PlanMaker,
        error: Exception,
        fatal: bool,
    ) -> None:
        executor.error = error
        maker.open(2, [1, 2, 3])
        socket.send(wire.encode(maker.plan({2: 3})))
        failure = wire.decode(socket.recv())
        assert isinstance(failure, wire.Failure)
        assert (failure.number, failure.slot, failure.fatal) == (1, -1, fatal)
        first_line = str(error).partition("\n")[0]
        assert failure.message == f"{type(error).__name__}: {first_line}"
