"""The worker process over its real socket, and what it chooses while it loads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import msgspec
import psutil
import pynng
import pytest
import torch

from gpu.__main__ import examine
from gpu.constraints.adjuster import Constraints
from gpu.constraints.grammar_trial import MAX_SECONDS
from gpu.kernels.device import KernelLaunchError
from gpu.loading.loaded_model import choose_num_threads
from gpu.loading.loading import choose_max_model_len
from gpu.worker import MAX_PREPARING, QuitRequested, Worker
from tests.support.plans import GREEDY, PlanMaker, load_tiny, make_runner
from tests.support.tiny_models import make_tiny, tiny_tokenizer
from trioserve.model_files import RopeScaling, open_model
from trioserve.protocol import wire
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.grammar import Grammar
from trioserve.protocol.machine import Machine
from trioserve.protocol.sampling import SamplerParams
from trioserve.scheduler.page_keys import KEY_BYTES

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 180.0
PROMPT = [5, 17, 200, 31, 8, 90, 44, 123, 9, 250]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("smollm2", tmp_path_factory.mktemp("model"))


def start_message(folder: Path, **changes: Any) -> wire.Start:
    fields: dict[str, Any] = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "max_model_len": 0,
        "max_num_seqs": 8, "max_num_batched_tokens": 0, "page_size": 4, "num_pages": 64,
        "kv_cache_dtype": "auto", "kv_cache_memory_bytes": 0, "gpu_memory_utilization": 0.9,
        "num_threads": 1, "logprobs_mode": "raw", "max_logprobs": 20, "enforce_eager": False,
        "deterministic": False, "quantization": "auto",
        "tokenizer": "", "logits_processors": [], **changes,
    }  # fmt: skip
    return wire.Start(**fields)


@attrs.define
class Peer:
    """The engine's end: a socket and the process behind it."""

    socket: pynng.Pair0
    process: subprocess.Popen[bytes]
    late: list[wire.Reply] = attrs.field(factory=list)
    """Answers that came while another one was waited for."""

    def send(self, message: wire.Message) -> None:
        self.socket.send(wire.encode(message))

    def receive(self) -> wire.Message:
        return wire.decode(self.socket.recv())

    def load(self, start: wire.Start) -> tuple[wire.Message, list[wire.LoadingProgress]]:
        """Say Start; the answer, and the progress before it."""
        self.send(start)
        progress = []
        while isinstance(message := self.receive(), wire.LoadingProgress):
            progress.append(message)
        return message, progress

    def step(self, plan: wire.Plan) -> wire.StepResult:
        self.send(plan)
        while isinstance(result := self.receive(), wire.Reply):
            self.late.append(result)
        assert isinstance(result, wire.StepResult)
        return result

    def call(self, number: int, name: str, arguments: object = None) -> wire.Reply:
        encoded = msgspec.msgpack.encode(arguments)
        self.send(wire.Call(number=number, name=name, arguments=encoded))
        while True:
            reply = self.receive()
            assert isinstance(reply, wire.Reply)
            if reply.number == number:
                return reply
            self.late.append(reply)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    """A worker that has just been started."""
    url = f"ipc://{tmp_path}/worker.sock"
    timeout = int(DEADLINE * 1000)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "gpu", "--connect", url]
    with pynng.Pair0(
        listen=url, recv_timeout=timeout, send_timeout=timeout, send_buffer_size=64
    ) as socket:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        try:
            yield Peer(socket, process)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def test_conversation(folder: Path, peer: Peer) -> None:
    hello = peer.receive()
    assert hello == wire.WorkerHello(
        protocol=wire.PROTOCOL_VERSION, schema=wire.schema_hash(),
        package=str(ROOT / "gpu"), pid=peer.process.pid,
    )  # fmt: skip
    ready, progress = peer.load(start_message(folder))
    assert isinstance(ready, wire.Ready)
    assert (ready.num_pages, ready.page_size, ready.vocab_size) == (64, 4, 300)
    assert (ready.max_model_len, ready.max_num_seqs, ready.max_num_batched_tokens) == (512, 8, 1024)
    assert (ready.device, ready.dtype) == ("cpu", "float32")
    assert ready.model_checksum == open_model(folder).checksum()
    last = [message for message in progress if message.stage == "weights"][-1]
    assert last.done == last.total > 0

    # The same tokens as the runner gives in this process, though the plans are sent ahead.
    maker, local = PlanMaker(peer.step), PlanMaker(make_runner(load_tiny(folder))[0].step)
    for side in (maker, local):
        side.open(2, PROMPT)
    plans = [maker.plan({2: count}) for count in (6, 4, 1, 1)]
    for plan in plans:
        peer.send(plan)
    tokens = []
    for plan in plans:
        result = peer.receive()
        assert isinstance(result, wire.StepResult)
        assert result.number == plan.number
        assert ints_of(result.slots) == [2]
        tokens += ints_of(result.tokens)
    assert tokens == [token for count in (6, 4, 1, 1) for token in local.step({2: count})[2]]

    statistics = msgspec.msgpack.decode(peer.call(1, "statistics").result)
    assert (statistics["open_slots"], statistics["pages_used"], statistics["steps"]) == (1, 3, 4)
    assert statistics["resident_bytes"] > 1 << 20
    assert msgspec.msgpack.decode(peer.call(2, "ping", [1, "two"]).result) == [1, "two"]
    assert "no call 'dance'" in peer.call(3, "dance").error

    # A failure refuses the plan behind it too, until Reset.
    peer.send(wire.Plan(number=5, closed=wire.from_ints([7])))
    peer.send(wire.Plan(number=6))
    failures = [peer.receive(), peer.receive()]
    assert [(f.number, f.slot, f.fatal) for f in failures if isinstance(f, wire.Failure)] == [
        (5, 7, False),
        (6, -1, False),
    ]
    peer.send(wire.Reset(next_plan=9))
    again = PlanMaker(peer.step)
    again.number = 8
    again.open(0, PROMPT, GREEDY)
    assert again.step({0: 10})[0] == tokens[:1]

    peer.send(wire.Quit())
    assert peer.process.wait(DEADLINE) == 0


def call(number: int, name: str, arguments: object) -> wire.Call:
    return wire.Call(number=number, name=name, arguments=msgspec.msgpack.encode(arguments))


def prepare(number: int, kind: str, text: str) -> wire.Call:
    return call(number, "prepare", {"grammar": [kind, text], "extra_args": {}})


def test_an_export_waits_for_the_plan_that_computes_its_pages(folder: Path, peer: Peer) -> None:
    peer.receive()
    ready, _ = peer.load(start_message(folder, kv_offloading_bytes=1 << 20))
    assert isinstance(ready, wire.Ready)
    maker = PlanMaker(peer.step)
    maker.open(0, [1 + number % 250 for number in range(120)])
    for plan in [maker.plan({0: 4}) for _ in range(30)]:
        peer.send(plan)
    for number, plan_of_pages in ((1, 2), (2, 30)):
        arguments = {"keys": [bytes(KEY_BYTES)], "pages": [63], "plan": plan_of_pages}
        peer.send(call(number, "export_pages", arguments))
    contents, done = {}, 0
    for _ in range(32):
        answer = peer.receive()
        if isinstance(answer, wire.Reply):
            contents[answer.number] = answer.result
            assert done < 30 if answer.number == 1 else done == 30
        else:
            assert isinstance(answer, wire.StepResult)
            done = answer.number
    assert contents[1] == contents[2] != b""


SLOW, HOPELESS = (
    json.dumps({"allOf": [{"pattern": f".*a{{{i}}}.*b"} for i in range(1, patterns)]})
    for patterns in (13, 30)
)
"""Takes processor time that quadruples with every pattern: half a second, and hours."""


def test_steps_go_on_while_a_grammar_is_compiled(folder: Path, peer: Peer) -> None:
    peer.receive()
    ready, _ = peer.load(start_message(folder))
    assert isinstance(ready, wire.Ready)
    maker = PlanMaker(peer.step)
    maker.open(0, PROMPT)
    maker.step({0: 10})
    peer.send(prepare(1, "json_schema", SLOW))
    peer.send(prepare(2, "json_schema", SLOW + " "))
    peer.send(prepare(3, "regex", "[ab]{3}"))  # waits for a thread
    for number in range(4, 12):
        maker.step({0: 1})
        assert peer.call(number, "ping", number).result == msgspec.msgpack.encode(number)
        # Were they held up, the first of them would have come after all that was compiled.
        assert number > 4 or peer.late == []
    while len(peer.late) < 3:  # with nothing else to do
        reply = peer.receive()
        assert isinstance(reply, wire.Reply)
        peer.late.append(reply)
    assert not any(reply.error for reply in peer.late)
    results = {reply.number: msgspec.msgpack.decode(reply.result) for reply in peer.late}
    for number in (1, 2):
        assert results[number]["param"] == "grammar"
        assert "Unable to determine if regex is empty" in results[number]["error"]
    assert results[3] > 0  # the bytes that the compiled grammar takes

    # What is compiled is followed, and ends with an end-of-sequence id.
    params = SamplerParams(temperature=5.0, stop_ids=[2], grammar=Grammar("regex", "[ab]{3}"))
    maker.open(1, PROMPT, params)
    tokens = [*maker.step({1: 10})[1], *(maker.step({1: 1})[1][0] for _ in range(3))]
    assert tiny_tokenizer().decode(tokens[:3], skip_special_tokens=False).strip("ab") == ""
    assert tokens[3] == 2

    children = psutil.Process(peer.process.pid).children()
    before = used = sum(child.cpu_times().user for child in children)
    peer.send(prepare(90, "json_schema", HOPELESS))
    while sum(child.cpu_times().user for child in children) < before + 0.1:
        time.sleep(0.02)
    peer.send(wire.Quit())
    with contextlib.suppress(psutil.NoSuchProcess):
        while peer.process.poll() is None:
            used = sum(child.cpu_times().user for child in children)
            time.sleep(0.02)
    assert peer.process.wait(DEADLINE) == 0
    assert psutil.wait_procs(children, timeout=DEADLINE)[1] == []
    # It didn't wait until the processor time that a grammar may take was used up.
    assert used - before < MAX_SECONDS - 1


class SlowConstraints(Constraints):
    """Finds everything fine, once it may."""

    def __init__(self) -> None:
        self.may = threading.Event()

    def prepare(
        self,
        grammar: Grammar | None,
        extra_args: Mapping[str, Any],
        processors: Sequence[str] = (),
        *,
        tried: bool = False,
    ) -> dict[str, str] | int:
        assert self.may.wait(DEADLINE)
        return 0


def test_few_calls_wait_to_be_prepared(folder: Path, tmp_path: Path) -> None:
    constraints = SlowConstraints()
    milliseconds = round(1000 * DEADLINE)
    options = {"recv_timeout": milliseconds, "send_timeout": milliseconds}
    with (
        pynng.Pair0(listen=f"ipc://{tmp_path}/worker.sock", **options) as engine,
        pynng.Pair0(dial=f"ipc://{tmp_path}/worker.sock", block_on_dial=True, **options) as end,
    ):
        runner, _ = make_runner(load_tiny(folder))

        def serve() -> None:
            with pytest.raises(QuitRequested):
                Worker(end).serve(runner, constraints)

        thread = threading.Thread(target=serve)
        thread.start()
        for number in range(MAX_PREPARING + 1):
            engine.send(wire.encode(prepare(number, "regex", "a")))
        refused = wire.decode(engine.recv())
        constraints.may.set()
        replies = [wire.decode(engine.recv()) for _ in range(MAX_PREPARING)]
        engine.send(wire.encode(wire.Quit()))
        thread.join(DEADLINE)
    assert refused == wire.Reply(
        number=MAX_PREPARING, error=f"{MAX_PREPARING} others wait for the worker already"
    )
    assert all(isinstance(reply, wire.Reply) and not reply.error for reply in replies)


class Hold:
    """Something that a failed step held."""


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (MemoryError("no room"), False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (KernelLaunchError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"), True),
    ],
)
def test_what_ends_a_worker_and_what_is_tried_again(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    fatal: bool,
) -> None:
    """After a step that found no memory, which is given back, the worker is as good as new."""
    caplog.set_level(logging.CRITICAL, "gpu.worker")  # a record would hold the error
    runner, _ = make_runner(load_tiny(folder))
    undisturbed = PlanMaker(make_runner(load_tiny(folder))[0].step)
    held: list[weakref.ref[Hold]] = []
    forward = runner._executor._model.forward  # type: ignore[attr-defined]

    def fails_once(*arguments: Any) -> Any:
        if not held:
            hold = Hold()
            held.append(weakref.ref(hold))
            raised = type(error)(*error.args)
            hold.cycle = [hold, raised]  # type: ignore[attr-defined]
            raise raised
        return forward(*arguments)

    milliseconds = round(1000 * DEADLINE)
    options = {"recv_timeout": milliseconds, "send_timeout": milliseconds}
    url = f"ipc://{tmp_path}/worker.sock"
    with pynng.Pair0(listen=url, **options) as engine, pynng.Pair0(dial=url, **options) as end:

        def serve() -> None:
            with pytest.raises(QuitRequested):
                Worker(end).serve(runner)

        def step(plan: wire.Plan) -> wire.Message:
            engine.send(wire.encode(plan))
            return wire.decode(engine.recv())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            maker, failures = PlanMaker(lambda plan: cast(wire.StepResult, step(plan))), []
            maker.open(0, PROMPT)
            undisturbed.open(0, PROMPT)
            assert maker.step({0: 10}) == undisturbed.step({0: 10})
            monkeypatch.setattr(runner._executor._model, "forward", fails_once)  # type: ignore[attr-defined]
            failures.append(step(maker.plan({0: 1})))
            engine.send(wire.encode(wire.Reset(next_plan=1)))
            again = PlanMaker(lambda plan: cast(wire.StepResult, step(plan)))
            again.open(0, PROMPT)
            expected = PlanMaker(make_runner(load_tiny(folder))[0].step)
            expected.open(0, PROMPT)
            for count in (10, 1, 1):
                assert again.step({0: count}) == expected.step({0: count})
        finally:
            engine.send(wire.encode(wire.Quit()))
            thread.join(DEADLINE)
    (failure,) = failures
    assert isinstance(failure, wire.Failure)
    assert (failure.fatal, failure.slot) == (fatal, -1)
    assert held[0]() is None


def ints_of(column: bytes) -> list[int]:
    return [int(number) for number in wire.ints(column)]


def test_end_of_standard_input_ends_it(folder: Path, peer: Peer) -> None:
    peer.receive()
    ready, _ = peer.load(start_message(folder))
    assert isinstance(ready, wire.Ready)
    assert peer.process.stdin is not None
    peer.process.stdin.close()
    assert peer.process.wait(DEADLINE) != 0


def test_signals_and_a_model_that_is_missing(tmp_path: Path, peer: Peer) -> None:
    peer.receive()
    failure, _ = peer.load(start_message(tmp_path / "nowhere"))
    assert isinstance(failure, wire.Failure)
    assert (failure.number, failure.fatal) == (0, True)
    assert "nowhere" in failure.message
    assert "\n" not in failure.message
    # It stays until the engine has heard, and leaves it to the engine when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        peer.process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        peer.process.wait(0.3)
    peer.send(wire.Quit())
    assert peer.process.wait(DEADLINE) == 0


@pytest.mark.parametrize(
    ("asked", "variable", "chosen"),
    [(5, "3", 5), (0, "3", 3), (0, "3,2", 3), (0, "99999", 1024), (0, "many", None), (0, "", None)],
)
def test_threads_are_asked_for_or_told_or_the_cores(
    asked: int, variable: str, chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert choose_num_threads(asked) == (chosen or max(int(Machine().cores()), 1))


def test_doctor_report_is_json() -> None:
    report = msgspec.json.decode(msgspec.json.encode(examine()))
    assert report["torch"] == str(torch.__version__)
    assert report["threads"] == choose_num_threads(0)
    assert len(report["cuda_devices"]) == torch.cuda.device_count()


def test_max_model_len(folder: Path) -> None:
    config = open_model(folder).config
    assert choose_max_model_len(0, config) == 512
    assert choose_max_model_len(100, config) == 100
    with pytest.raises(ModelLoadError, match="513 is more than this model's 512"):
        choose_max_model_len(513, config)
    dynamic = attrs.evolve(config, rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    assert choose_max_model_len(1024, dynamic) == 1024
    assert choose_max_model_len(0, dynamic) == 512
    with pytest.raises(ModelLoadError, match="1025"):
        choose_max_model_len(1025, dynamic)
    scaling = RopeScaling(kind="longrope", long_positions=4096)
    longrope = attrs.evolve(config, rope_scaling=scaling)
    assert choose_max_model_len(4096, longrope) == 4096
    assert choose_max_model_len(0, longrope) == 512
    with pytest.raises(ModelLoadError, match="4097 is more than this model's 4096"):
        choose_max_model_len(4097, longrope)
