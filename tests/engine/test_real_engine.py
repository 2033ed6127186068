"""The engine with its real worker process: what it leaves behind, and what a dead worker costs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import trio

import trioserve
from tests.support.engines import assert_idle, open_compiled_engine
from tests.support.tiny_models import make_tiny
from trioserve import (
    LLM,
    EngineConfig,
    EngineError,
    InvalidRequest,
    ModelLoadError,
    ServerConfig,
    open_engine,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("llama2"), head_dim=32)


def workers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is none
            if "gpu" in child.cmdline():
                found.append(child)
    return found


async def complete(engine: object, **options: object) -> list[int]:
    defaults = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    completion = await engine.complete([3, 4, 5], **{**defaults, **options})  # type: ignore[attr-defined]
    return list(completion.token_ids)


async def test_leaving_the_block_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def once() -> None:
        async with open_compiled_engine(tiny) as engine:
            assert len(await complete(engine)) == 40
            assert len(workers()) == 1

    await once()  # libraries start threads of their own with the first use
    threads = {thread.ident for thread in threading.enumerate()}
    files = len(os.listdir("/proc/self/fd"))
    tasks = trio.lowlevel.current_statistics().tasks_living
    await once()
    assert workers() == []
    assert list(tmp_path.iterdir()) == []
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    # trio keeps idle threads for a few seconds, and nng reaps sockets on a thread of its own.
    with trio.fail_after(60):
        while True:
            new = [thread for thread in threading.enumerate() if thread.ident not in threads]
            if not new and len(os.listdir("/proc/self/fd")) <= files:
                break
            await trio.sleep(0.1)


async def test_an_error_while_the_model_loads_is_one_line(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        async with open_engine(str(tmp_path / "nothing.gguf")):
            raise AssertionError("opened a model that isn't there")
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelLoadError, match=r"max.model.len") as caught:
        async with open_compiled_engine(tiny, max_model_len=100_000):
            raise AssertionError("the worker took a length past the model's")
    assert "\n" not in str(caught.value)
    assert workers() == []


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_killed_worker_is_a_pause(tiny: Path, depth: int) -> None:
    options = {"max_tokens": 400, "temperature": 0.8, "seed": 5}
    async with open_compiled_engine(tiny, max_plans_in_flight=depth) as engine:
        expected = await complete(engine, **options)
        tokens: list[int] = []
        async with engine.generate([3, 4, 5], ignore_eos=True, **options) as stream:
            async for chunk in stream:
                tokens.extend(chunk.token_ids)
                if engine.statistics().worker_restarts == 0 and len(tokens) >= 20:
                    for worker in workers():
                        worker.send_signal(signal.SIGKILL)
                    while engine.statistics().worker_restarts == 0:
                        await trio.sleep(0.01)
        assert engine.statistics().worker_restarts == 1
        assert tokens == expected
        await assert_idle(engine)


async def test_two_engines_in_one_program(tiny: Path) -> None:
    async with open_compiled_engine(tiny) as one, open_compiled_engine(tiny) as other:
        assert len(workers()) == 2
        assert await complete(one) == await complete(other)


async def test_a_server_in_a_nursery_ends_with_it(tiny: Path, tmp_path: Path) -> None:
    config = ServerConfig(
        engine=EngineConfig(str(tiny), device="cpu", dtype="bfloat16", num_threads=1, seed=5),
        uds=str(tmp_path / "server.sock"),
        served_model_name="mine",
    )
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(trioserve.serve, config)
        assert urls == [f"unix:{config.uds}"]
        transport = httpx.AsyncHTTPTransport(uds=config.uds)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=60
        ) as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["id"] == "mine"
            body = {"model": "mine", "prompt": [3, 4], "max_tokens": 5, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == 5
            assert (await client.post("/v1/completions", json={"model": "x"})).status_code == 400
        nursery.cancel_scope.cancel()
    assert workers() == []
    assert not Path(urls[0].removeprefix("unix:")).exists()


def test_a_killed_parent_takes_its_worker_and_its_socket_along(tiny: Path, tmp_path: Path) -> None:
    program = (
        "import sys, trio, trioserve\n"
        "async def main():\n"
        "    async with trioserve.open_engine(sys.argv[1], device='cpu') as engine:\n"
        "        print((await engine.call_worker('ping', 1)), flush=True)\n"
        "        await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tiny)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"1\n"
    (worker,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(timeout=60)
    assert not worker.is_running()
    assert list(tmp_path.glob("trioserve-*")) == []


def test_a_script_without_trio(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(str(tiny), device="cpu", num_threads=1) as llm:
        options = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
        batch = llm.generate([[3, 4], [5, 6, 7], "hello"], **options)
        assert [len(completion.token_ids) for completion in batch] == [10, 10, 10]
        assert capsys.readouterr().err == ""
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
        (single,) = llm.generate([3, 4], **options)
        shown = capsys.readouterr().err
        assert "Generating" in shown
        assert "1/1" in shown
        llm.generate([3, 4], progress=False, **options)
        assert capsys.readouterr().err == ""
        assert single.token_ids == batch[0].token_ids
        (chat,) = llm.generate([{"role": "user", "content": "hello"}], **options)
        assert chat.usage.prompt_tokens > 5
        with pytest.raises(InvalidRequest, match="temperature"):
            llm.generate("hello", temperature=-1)
        with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
            llm.generate(["hello"], [None, None])  # type: ignore[list-item]
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("hello")
    assert workers() == []


def test_closing_a_script_s_model_ends_what_another_thread_waits_for(tiny: Path) -> None:
    with LLM(str(tiny), device="cpu", num_threads=1) as llm:
        (worker,) = workers()
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                llm.generate([[3, 4]] * 4, max_tokens=5, ignore_eos=True)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=generate)
        worker.suspend()  # nothing ends by itself
        thread.start()
        while llm.statistics().num_streams < 4:
            time.sleep(0.01)
        llm.close()
        thread.join(60)
    (error,) = errors
    assert isinstance(error, EngineError)
    assert "closed" in str(error)
    assert workers() == []


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Python's own handling of SIGINT, also where the tests run in a shell's background, which
    starts its commands with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_what_a_script_was_waiting_for(tiny: Path) -> None:
    with LLM(str(tiny), device="cpu", num_threads=1) as llm:
        (worker,) = workers()
        worker.suspend()  # nothing ends by itself
        timer = threading.Timer(0.2, _interrupt_main_thread)
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            llm.generate([[3, 4]] * 4, max_tokens=5, ignore_eos=True)
        timer.join()
        deadline = time.monotonic() + 60
        while llm.statistics().num_streams and time.monotonic() < deadline:
            time.sleep(0.01)
        assert llm.statistics().num_streams == 0
        worker.resume()
        (after,) = llm.generate([3, 4], max_tokens=5, ignore_eos=True)
        assert len(after.token_ids) == 5


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_a_script_s_model_is_loaded_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = workers()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupt_once_there_is_a_worker() -> None:
        # Which takes many times as long to load as this takes to find it.
        while workers() == before:
            time.sleep(0.001)
        _interrupt_main_thread()

    thread = threading.Thread(target=interrupt_once_there_is_a_worker)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        LLM(str(tiny), device="cpu", num_threads=1)
    thread.join()
    assert workers() == before
    assert list(tmp_path.iterdir()) == []
    assert "trioserve-llm" not in {thread.name for thread in threading.enumerate()}


def _interrupt_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_a_script_that_forgets_to_close_still_ends(tiny: Path) -> None:
    program = (
        "import sys, trioserve\n"
        "llm = trioserve.LLM(sys.argv[1], device='cpu')\n"
        "print(len(llm.generate([3, 4], max_tokens=5, ignore_eos=True)[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
