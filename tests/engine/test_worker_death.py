"""Real workers that are killed, crash and hang under requests of every kind, which notice a pause.

The model is tiny and the compiled kernels compute it, so the tokens are the same.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import psutil
import pytest
import trio
import trio.testing

from tests.support.engines import assert_idle, open_compiled_engine, worker_of
from tests.support.rounding import apart, terms_of_folder
from tests.support.tiny_models import make_tiny
from trioserve import Engine
from trioserve._util.child_process import KILL_GRACE
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError, WorkerLost
from trioserve.protocol.grammar import Grammar
from trioserve.workers import process as worker_process
from trioserve.workers.command import worker_command
from trioserve.workers.link import NngLink
from trioserve.workers.supervisor import TAKE_OVER, Supervisor

LONG = list(range(5, 105))

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": [3, 4, 5], "temperature": 0, "max_tokens": 150},
    "seeded": {"prompt": [3, 4, 6], "temperature": 0.9, "seed": 1, "max_tokens": 150},
    "several": {"prompt": LONG, "n": 2, "seed": 2, "max_tokens": 100},
    "of the prompt": {"prompt": LONG[::-1], "seed": 3, "prompt_logprobs": 1, "max_tokens": 60},
    "with logprobs": {"prompt": [7, 8], "seed": 4, "logprobs": 2, "max_tokens": 80},
    "in a grammar": {"prompt": [9, 9], "seed": 5, "grammar": Grammar("regex", "(ab|cd){20,60}")},
    "with stops": {"prompt": [9, 8], "seed": 6, "stop": ["never to be seen"], "max_tokens": 90},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"), head_dim=32)


@attrs.define(eq=False)
class Answers:
    """The results of each kind of request, and the number of all tokens."""

    outputs: dict[str, dict[int, str]] = attrs.field(factory=dict)
    token_ids: dict[str, dict[int, list[int]]] = attrs.field(factory=dict)
    reported: dict[str, list[float]] = attrs.field(factory=dict)
    num_tokens: int = 0

    async def ask(self, engine: Engine, kind: str) -> None:
        params = {"ignore_eos": kind != "in a grammar", **KINDS[kind]}
        texts = self.outputs.setdefault(kind, {})
        tokens = self.token_ids.setdefault(kind, {})
        logprobs: list[float] = []
        async with engine.generate(params.pop("prompt"), **params) as stream:
            async for chunk in stream:
                texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
                tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
                logprobs += [each.logprob for each in chunk.logprobs or ()]
                self.num_tokens += len(chunk.token_ids)
            if stream.prompt_logprobs is not None:
                entries = stream.prompt_logprobs.entries(list(stream.prompt_token_ids))
                logprobs += [each.logprob for each in entries]
        self.reported[kind] = logprobs

    async def ask_all(self, engine: Engine) -> None:
        async with trio.open_nursery() as nursery:
            for kind in KINDS:
                nursery.start_soon(self.ask, engine, kind)


@pytest.mark.parametrize(
    ("depth", "signals"),
    [(1, (signal.SIGKILL, signal.SIGSTOP)), (2, (signal.SIGSEGV, signal.SIGKILL))],
)
async def test_requests_of_every_kind_outlive_their_worker(
    tiny: Path, caplog: pytest.LogCaptureFixture, depth: int, signals: tuple[signal.Signals, ...]
) -> None:
    """Check that no token is retracted, repeated or changed, however the worker ended."""
    options = {"max_plans_in_flight": depth, "watchdog_timeout": 5, "max_num_batched_tokens": 64}
    async with open_compiled_engine(tiny, **options) as engine:
        calm, disturbed = Answers(), Answers()
        await calm.ask_all(engine)

        async def disturb() -> None:
            for number, each in enumerate(signals, 1):
                due = number * calm.num_tokens // (len(signals) + 1)
                while disturbed.num_tokens < due:
                    await trio.sleep(0.002)
                worker = await worker_of(engine)
                worker.send_signal(each)
                while engine.statistics().worker_restarts < number:
                    await trio.sleep(0.01)
                assert not worker.is_running()
                stopped = f"process {worker.pid} was stopped by a signal" in caplog.text
                assert stopped == (each is signal.SIGSTOP)

        with caplog.at_level(logging.WARNING):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                nursery.start_soon(disturbed.ask_all, engine)
        assert engine.statistics().worker_restarts == len(signals)
        assert disturbed.token_ids == calm.token_ids
        assert disturbed.outputs == calm.outputs
        # Rounding may differ: another batch computes it.
        terms = terms_of_folder(tiny, len(LONG) + 90)
        expected = {
            kind: pytest.approx(each, abs=apart(terms, each) if each else 0)
            for kind, each in calm.reported.items()
        }
        assert disturbed.reported == expected
        assert "request blamed" not in caplog.text
        await assert_idle(engine)


SLOW_TO_COMPILE = """
import os, sys, time
from gpu import worker
from gpu.constraints.grammar_cache import GrammarCache
prepare = GrammarCache.prepare
def slow(self, grammar, **options):
    while os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    return prepare(self, grammar, **options)
GrammarCache.prepare = slow
worker.run(sys.argv[2])
"""
"""A worker that compiles no grammar while there is a file of that name."""


async def test_a_stream_goes_on_while_a_grammar_is_compiled_again(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    start_workers_with(SLOW_TO_COMPILE, gate, monkeypatch)
    plain = {"prompt": [3, 4, 5], "temperature": 0, "ignore_eos": True, "max_tokens": 180}
    grammar = Grammar("regex", "(ab|cd){20,60}")
    constrained = {"prompt": [9, 9], "seed": 5, "max_tokens": 60, "grammar": grammar}

    async def tokens_of(engine: Engine, *, kill: bool) -> list[list[int]]:
        outputs: list[list[int]] = [[], []]

        async def ask(output: list[int], params: dict[str, Any]) -> None:
            async with engine.generate(**params) as stream:
                async for chunk in stream:
                    output += chunk.token_ids

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, outputs[1], constrained)
            while not outputs[1]:
                await trio.sleep(0.001)
            nursery.start_soon(ask, outputs[0], plain)
            if kill:
                while min(map(len, outputs)) < 5:
                    await trio.sleep(0.001)
                gate.touch()
                (await worker_of(engine)).kill()
                while engine.statistics().worker_restarts == 0:
                    await trio.sleep(0.001)
                await trio.testing.wait_all_tasks_blocked()  # The lost worker's tokens are there.
                num_before = list(map(len, outputs))
                while len(outputs[0]) < num_before[0] + 20:
                    await trio.sleep(0.001)
                assert len(outputs[1]) == num_before[1]
                gate.unlink()
        return outputs

    async with open_compiled_engine(tiny) as engine:
        calm = await tokens_of(engine, kill=False)
        assert await tokens_of(engine, kill=True) == calm
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)


def start_workers_with(program: str, argument: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make workers run ``program``, whose arguments are ``argument`` and the engine's URL."""

    def command(url: str) -> tuple[list[str], dict[str, str]]:
        environment = worker_command(url)[1]
        return [sys.executable, "-P", "-c", program, str(argument), url], environment

    monkeypatch.setattr(worker_process, "worker_command", command)


FAILING = """
import os, sys, torch
from gpu import runner, worker
submit, steps = runner.Runner.submit, 0
def failing(self, plan):
    global steps
    steps += 1
    if steps == 12 and os.path.exists(sys.argv[1]):
        os.remove(sys.argv[1])
        raise {error}
    return submit(self, plan)
runner.Runner.submit = failing
worker.run(sys.argv[2])
"""
"""A worker that fails in its twelfth step, for the first one that gets there."""


@pytest.mark.parametrize(
    ("error", "num_replaced"),
    [
        ("torch.AcceleratorError('CUDA error: an illegal memory access was encountered')", 1),
        ("torch.OutOfMemoryError('CUDA out of memory')", 0),
    ],
)
async def test_a_poisoned_context_costs_the_process_and_missing_memory_does_not(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, num_replaced: int
) -> None:
    once = tmp_path / "once"
    start_workers_with(FAILING.format(error=error), once, monkeypatch)
    async with open_compiled_engine(
        tiny, max_plans_in_flight=2, max_num_batched_tokens=64
    ) as engine:
        calm, disturbed = Answers(), Answers()
        await calm.ask_all(engine)
        (before,) = [each for each in psutil.Process().children() if str(once) in each.cmdline()]
        once.touch()
        before.kill()  # the steps that count are the next one's
        await disturbed.ask_all(engine)
        assert not once.exists()
        assert engine.statistics().worker_restarts == 1 + num_replaced
        assert disturbed.token_ids == calm.token_ids
        assert disturbed.outputs == calm.outputs
        await assert_idle(engine)


# ---- the process and what it has started


@attrs.define(eq=False)
class Undead:
    """A process that waits in the kernel, where no signal reaches it."""

    pid: int
    stdin: trio.testing.MemorySendStream = attrs.field(
        factory=lambda: trio.testing.memory_stream_one_way_pair()[0]
    )
    returncode: int | None = None

    async def wait(self) -> None:
        await trio.sleep_forever()


class DeafLink:
    def send_nowait(self, _: wire.Message) -> bool:
        return False


async def test_a_process_that_can_not_be_killed_holds_nobody_up(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    # There is no group of this number: process ids end before it.
    undead = Undead(pid=(1 << 31) - 1)
    with trio.fail_after(60):
        await worker_process._stop(cast(trio.Process, undead), cast(NngLink, DeafLink()))
    assert trio.current_time() == worker_process.QUIT_GRACE + KILL_GRACE
    assert "worker can't be killed" in caplog.text


async def test_a_group_that_may_not_be_killed_holds_nobody_up(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignore this error, which some systems raise for a group after its leader's end."""

    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "killpg", refuse)
    ended = Undead(pid=(1 << 31) - 1, returncode=1)
    await worker_process._stop(cast(trio.Process, ended), cast(NngLink, DeafLink()))
    assert trio.current_time() == KILL_GRACE


async def test_what_a_worker_has_started_ends_with_it() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(await process.stdout.receive_some()))
    # A worker that dies by itself leaves its children behind, too.
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert child.is_running()
    await worker_process._stop(process, cast(NngLink, DeafLink()))
    with trio.fail_after(30):
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            await trio.sleep(0.01)
    await process.stdout.aclose()


# ---- loading again


def supervised(
    losses: list[WorkerLost | ModelLoadError], deaths: list[WorkerLost]
) -> tuple[Supervisor, Callable[..., Awaitable[None]]]:
    """Return a supervisor of workers that are lost so, or never loaded, and its attach function."""

    class Life:
        async def __aenter__(self) -> tuple[Any, Any]:
            loss = losses.pop(0)
            if isinstance(loss, ModelLoadError):
                raise loss
            self.loss = loss
            return None, SimpleNamespace(pid=1, rank_pids=[])

        async def __aexit__(self, *_: object) -> None:
            raise self.loss

    async def attach(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    def judge(loss: WorkerLost) -> int:
        deaths.append(loss)
        return len(deaths)

    return Supervisor(open_worker=cast(Any, Life), max_restarts=3, judge=judge), attach


async def test_a_model_that_can_not_be_loaded_again_at_once_is_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Fail to load, as when the memory of the last worker isn't free yet."""
    refusal = ModelLoadError("the weights take more than there is")
    deaths: list[WorkerLost] = []
    keeper, attach = supervised([WorkerLost("killed"), *[refusal] * 4], deaths)
    with pytest.raises(ModelLoadError):
        await keeper.run(attach)
    assert len(deaths) == 4
    assert keeper.restarts == 3
    # The first time it is the user's to mend.
    keeper, attach = supervised([refusal], deaths := [])
    with pytest.raises(ModelLoadError):
        await keeper.run(attach)
    assert deaths == []


@pytest.mark.parametrize(("others_serve", "seconds"), [(False, 0.05), (True, TAKE_OVER)])
async def test_the_next_worker_leaves_the_cores_to_others_that_take_over(
    autojump_clock: trio.testing.MockClock, others_serve: bool, seconds: float
) -> None:
    keeper, attach = supervised([WorkerLost("killed"), ModelLoadError("no file")], [])
    keeper.others_serve = lambda: others_serve
    keeper.max_restarts = 1
    with pytest.raises(ModelLoadError):
        await keeper.run(attach)
    assert trio.current_time() == pytest.approx(seconds)


def test_a_worker_keeps_few_compiled_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its user says how many."""
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    _, environment = worker_command("ipc:///nowhere")
    assert environment["LRU_CACHE_CAPACITY"] == "128"
    assert environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "512"
