"""Engines whose workers join over TLS: joining, leaving, and all ways to lose the link.

The workers compute nothing (``trioserve serve --mock-worker``), so an output depends on its length
only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from tests.support.cut_network import open_network
from tests.support.engines import assert_idle, facts_of, open_tiny_engine
from tests.support.other_hosts import (
    ENGINE_OPTIONS,
    TOKENS,
    address_of,
    agent_for,
    ask,
    open_mock_engine,
    running,
    told,
    wait_states,
)
from tests.support.ports import free_port
from tests.support.process_faults import hung
from tests.support.tiny_encoders import make_encoder
from tests.support.tiny_models import make_tiny
from trioserve import ModelLoadError
from trioserve.model_files import open_model
from trioserve.observability import live
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.grammar import Grammar
from trioserve.workers.remote import joined as joined_module
from trioserve.workers.remote.certificates import make_certificates


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


def worker_processes() -> list[psutil.Process]:
    """Return the worker processes below this one: of engine and agents."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "gpu" in each.cmdline():
                found.append(each)
    return found


async def test_an_engine_without_workers_opens_when_one_has_joined(model: Path, tls: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    agent = agent_for(address, tls, model)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.run)
        async with open_mock_engine(
            model, tls, data_parallel_size=0, worker_listen=address
        ) as engine:
            (output,) = await ask(engine, 1)
            assert len(output) == TOKENS
            (report,) = engine.workers
            assert (report.host, report.pid, report.state) == ("other", None, "running")
            assert report.plan_bytes > 0
            with live.monitor_of(engine).watched(requests=1, nodes=1) as watcher:
                await ask(engine, 1)
                await trio.sleep(0.5)
                (row,) = watcher.take().workers
            assert (row.host, row.round_trip_ms) == ("other", engine.workers[0].round_trip_ms)
            assert row.round_trip_ms is not None
            assert row.plan_bytes is not None
            assert 1 < row.plan_bytes < 10_000
            text = engine.metrics.render().decode()
            assert 'worker_round_trip_seconds{engine="0",' in text
            assert 'worker_plan_bytes_total{engine="0",' in text
            await assert_idle(engine)
        agent.leave()


async def test_a_joined_worker_shares_the_work_and_leaves(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        alone = await ask(engine)
        core, own = min(os.sched_getaffinity(0)), engine.workers[0].pid
        async with running(agent_for(address_of(engine), tls, model, device=f"cpu:{core}")):
            await wait_states(engine, "running", "running")
            (process,) = [each for each in worker_processes() if each.pid != own]
            assert os.sched_getaffinity(process.pid) == {core}
            assert await ask(engine, 8) == [*alone, *alone]
            assert min(each.num_steps for each in engine.workers) >= TOKENS
            async with trio.open_nursery() as nursery:
                answers: list[Any] = []

                async def ask_all() -> None:
                    answers.extend(await ask(engine, 8))

                nursery.start_soon(ask_all)
                await trio.sleep(0.1)
                report = await engine.add_worker()
                assert (report.index, report.host) == (2, None)
            assert answers == [*alone, *alone]
        # It left, and isn't waited for.
        await wait_states(engine, "running", "running")
        assert [each.index for each in engine.workers] == [0, 2]
        await assert_idle(engine)


async def test_joined_workers_have_roles(model: Path, tls: Path) -> None:
    async with (
        open_mock_engine(model, tls, kv_offloading_bytes=1 << 20) as engine,
        running(agent_for(address_of(engine), tls, model, computes="prefill")),
        running(agent_for(address_of(engine), tls, model, computes="decode")),
    ):
        await wait_states(engine, "running", "running", "running")
        assert sorted(each.role for each in engine.workers) == ["both", "decode", "prefill"]
        await engine.remove_worker(0)
        await ask(engine, 3)
        assert engine.statistics().scheduler.num_handed_over == 3
        await assert_idle(engine)


async def test_a_role_without_memory_for_pages_is_turned_away(
    model: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_mock_engine(model, tls) as engine,
        running(agent_for(address_of(engine), tls, model, computes="decode")),
    ):
        with trio.fail_after(10):
            while not told(caplog, "the role decode needs pages that are handed over"):
                await trio.sleep(0.01)
        assert len(engine.workers) == 1


async def test_a_client_that_leaves_is_noticed_over_the_link(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        async with running(agent_for(address_of(engine), tls, model)):
            await wait_states(engine, "running", "running")
            with trio.move_on_after(0.3):
                await ask(engine, 6, 400)
            with trio.fail_after(10):
                while engine.statistics().scheduler.num_running:
                    await trio.sleep(0.01)
            await assert_idle(engine)
            steps = [each.num_steps for each in engine.workers]
            assert min(steps) > 0
            await trio.sleep(0.3)
            assert [each.num_steps for each in engine.workers] == steps


@pytest.mark.parametrize("how", ["killed", "closed", "half-open", "stopped", "hung"])
async def test_a_lost_workers_requests_go_on_elsewhere_and_it_joins_again(
    how: str, model: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_mock_engine(model, tls, watchdog_timeout=1.0) as engine,
        open_network(address_of(engine)) as network,
    ):
        alone = await ask(engine)
        async with (
            running(agent_for(network.address, tls, model)),
            contextlib.AsyncExitStack() as faults,
        ):
            await wait_states(engine, "running", "running")
            own = engine.workers[0].pid
            (process,) = [each for each in worker_processes() if each.pid != own]
            answers: list[Any] = []

            async def ask_all() -> None:
                answers.extend(await ask(engine, 8))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_all)
                await trio.sleep(0.2)
                assert engine.workers[1].num_running > 0
                if how == "killed":
                    process.kill()
                elif how == "closed":
                    await network.close()
                elif how == "half-open":
                    network.hold()
                elif how == "stopped":
                    process.send_signal(signal.SIGSTOP)
                else:
                    faults.enter_context(hung(process.pid))  # its agent still answers
                with trio.fail_after(20):
                    while engine.workers[1].state != "restarting":
                        await trio.sleep(0.001)
                # A request in flight on a worker that hung may have caused it, so it waits for it.
                assert engine.workers[1].num_running == 0
                assert engine.workers[1].num_waiting == (4 if how == "hung" else 0)
            assert answers == [*alone, *alone]
            expected = {
                "killed": "was killed by signal 9",
                "closed": "connection",
                "half-open": "nothing was heard of it for 1 s",
                "stopped": "was stopped by a signal",
                "hung": "no step within",
            }[how]
            assert len(told(caplog, "worker lost")) == 1
            assert expected in told(caplog, "worker lost")[0]
            with trio.fail_after(10):
                await process_gone(process)
            network.open()
            network.flow()
            await wait_states(engine, "running", "running")
            assert engine.workers[1].restarts == 1
            assert await ask(engine, 8) == [*alone, *alone]
            await assert_idle(engine)


async def test_cut_after_cut_loses_no_request(model: Path, tls: Path) -> None:
    """Two hosts, cut off in turn: by a closed connection, and by a network that goes silent."""
    async with (
        open_mock_engine(model, tls, worker_link_timeout=0.5) as engine,
        open_network(address_of(engine)) as first,
        open_network(address_of(engine)) as second,
        running(agent_for(first.address, tls, model, host="first")),
        running(agent_for(second.address, tls, model, host="second")),
    ):
        alone = await ask(engine)
        await wait_states(engine, "running", "running", "running")
        await engine.remove_worker(0)
        num_answers = 0

        async def ask_again_and_again() -> None:
            nonlocal num_answers
            while not done.is_set():
                assert await ask(engine) == alone
                num_answers += len(alone)

        done = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_again_and_again)
            nursery.start_soon(ask_again_and_again)
            for number in range(8):
                await trio.sleep(0.3)
                network = (first, second)[number % 2]
                if number % 4 < 2:
                    await network.close()
                else:
                    network.hold()
                with trio.fail_after(20):
                    while all(each.state == "running" for each in engine.workers):
                        await trio.sleep(0.001)
                network.open()
                network.flow()
                await wait_states(engine, "running", "running")
            done.set()
        assert num_answers > 8
        # A busy machine may be silent for longer than the timeout by itself.
        assert sum(each.restarts for each in engine.workers) >= 8
        await assert_idle(engine)


async def process_gone(process: psutil.Process) -> None:
    """Block until the agent has ended its worker process."""
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        await trio.sleep(0.01)


async def test_the_last_workers_requests_wait_until_one_joins(
    model: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The requests of a worker that left go to the next one, which has another name."""
    async with open_mock_engine(model, tls) as engine:
        first = agent_for(address_of(engine), tls, model, host="first")
        async with running(first):
            await wait_states(engine, "running", "running")
            await engine.remove_worker(0)
            answers: list[Any] = []

            async def ask_all() -> None:
                answers.extend(await ask(engine, 3))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask_all)
                await trio.sleep(0.2)
                first.leave()
                await wait_states(engine, "restarting")
                async with running(agent_for(address_of(engine), tls, model, host="second")):
                    with trio.fail_after(30):
                        while not answers:
                            await trio.sleep(0.01)
                    assert [(each.index, each.host) for each in engine.workers] == [(2, "second")]
            assert [len(each) for each in answers] == [TOKENS] * 3


async def test_a_worker_that_stays_away_is_given_up(
    model: Path, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_module, "REJOIN_TIMEOUT", 0.3)
    async with open_mock_engine(model, tls) as engine, open_network(address_of(engine)) as network:
        async with running(agent_for(network.address, tls, model)):
            await wait_states(engine, "running", "running")
            await network.close()
            await wait_states(engine, "running")
            network.open()
            await wait_states(engine, "running", "running")
            assert [each.index for each in engine.workers] == [0, 2]


async def test_an_agent_joins_the_next_engine_at_its_address(model: Path, tls: Path) -> None:
    async with open_network("127.0.0.1:1") as network:
        async with running(agent_for(network.address, tls, model)):
            for _ in range(2):
                async with open_mock_engine(model, tls) as engine:
                    network.target = address_of(engine)
                    network.open()
                    await wait_states(engine, "running", "running")
                    assert len(await ask(engine)) == 4
                await network.close()


async def test_a_worker_that_is_removed_ends(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        agent = agent_for(address_of(engine), tls, model)
        failures: list[Exception] = []

        async def run() -> None:
            try:
                await agent.run()
            except TrioserveError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await wait_states(engine, "running", "running")
            await engine.remove_worker(1)
        assert str(failures[0]) == "the engine refused the worker: it was removed"
        await wait_states(engine, "running")


async def test_a_worker_is_starting_until_it_gets_requests(model: Path, tls: Path) -> None:
    """Also while it serves already, and waits for another change of the workers to end."""
    async with (
        open_mock_engine(model, tls) as engine,
        running(agent_for(address_of(engine), tls, model)),
    ):
        async with engine.worker_group.schedulers.changing:
            with trio.fail_after(60):
                while not any(each.device for each in engine.workers[1:]):
                    await trio.sleep(0.01)
            for _ in range(20):
                assert [each.state for each in engine.workers] == ["running", "starting"]
                await trio.sleep(0.001)
        await wait_states(engine, "running", "running")


async def test_memory_is_released_on_all_hosts(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        async with running(agent_for(address_of(engine), tls, model)):
            await wait_states(engine, "running", "running")
            await engine.release_memory()
            with trio.fail_after(10):
                while worker_processes():
                    await trio.sleep(0.01)
            await engine.resume_memory()
            await wait_states(engine, "running", "running")
            assert len(await ask(engine)) == 4


async def test_another_model_is_refused_by_name(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        agent = agent_for(address_of(engine), tls, model, checksum="0" * 32)
        with pytest.raises(TrioserveError, match=f"checksum {'0' * 32}.*give both the same MODEL"):
            await agent.run()
        await wait_states(engine, "running")


async def test_a_worker_that_can_not_load_ends_with_the_reason(model: Path, tls: Path) -> None:
    async with open_mock_engine(model, tls) as engine:
        agent = agent_for(
            address_of(engine), tls, model.parent, checksum=open_model(model).checksum()
        )
        with pytest.raises(TrioserveError, match=r"the engine refused the worker: .*config\.json"):
            await agent.run()
        await wait_states(engine, "running")
        assert len(await ask(engine)) == 4


async def test_files_that_are_not_on_the_workers_host_are_named(
    model: Path, tls: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    async with open_mock_engine(model, tls, tokenizer=str(tokenizer)) as engine:
        os.rename(tokenizer, tmp_path / "elsewhere")
        with pytest.raises(TrioserveError, match=f"--tokenizer {tokenizer} isn't on other"):
            await agent_for(address_of(engine), tls, model).run()


async def test_an_agent_names_what_keeps_it_from_joining(
    model: Path, tls: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path)
    async with open_mock_engine(model, tls) as engine:
        for address, folder, reason in (
            ("127.0.0.1:1", tls, "Connection refused"),
            (address_of(engine), tmp_path, "certificate"),
        ):
            async with running(agent_for(address, folder, model)):
                with trio.fail_after(20):
                    while not any(reason in line for line in told(caplog, "not serving")):
                        await trio.sleep(0.01)
        assert len(engine.workers) == 1


async def test_plans_in_flight_hide_the_delay_of_the_network(model: Path, tls: Path) -> None:
    """A step of 20 ms over a link of 60 ms: with one plan at a time it would take 80 ms."""
    step, delay, num_steps = 0.02, 0.03, 60
    seconds = {}
    for depth in (1, 4):
        options: dict[str, Any] = {"step": step, "max_plans_in_flight": depth}
        options["worker_link_timeout"] = 5.0
        async with (
            open_mock_engine(model, tls, **options) as engine,
            open_network(address_of(engine)) as network,
        ):
            network.delay = delay
            async with running(agent_for(network.address, tls, model)):
                await wait_states(engine, "running", "running")
                await engine.remove_worker(0)
                await ask(engine, 1, 4)
                began = trio.current_time()
                await ask(engine, 1, num_steps)
                seconds[depth] = (trio.current_time() - began) / num_steps
                round_trip = engine.workers[0].round_trip_ms
                assert round_trip is not None
                assert 2 * delay <= round_trip / 1000 < 4 * delay
    assert seconds[1] > step + 2 * delay
    # The machine may be busy, so a step isn't held to its 20 ms.
    assert seconds[4] < 0.6 * seconds[1]


async def test_a_joined_worker_computes_the_same_bits(model: Path, tls: Path) -> None:
    """With the compiled kernels; the worker on the engine's host is removed meanwhile."""

    kinds: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"logprobs": 1, "grammar": Grammar("regex", "(ab|cd){10,20}"), "n": 2},
    ]
    options = {**ENGINE_OPTIONS, "data_parallel_size": 1, "worker_tls": str(tls)}
    options["dtype"] = "bfloat16"
    async with open_tiny_engine(model, **options) as engine:
        alone = await facts_of(engine, kinds, 6, max_tokens=30)
        async with running(agent_for(address_of(engine), tls, model)):
            await wait_states(engine, "running", "running")
            assert await facts_of(engine, kinds, 6, max_tokens=30) == alone
            await engine.remove_worker(0)
            assert await facts_of(engine, kinds, 6, max_tokens=30) == alone
            await assert_idle(engine)


async def test_an_encoder_is_refused(tls: Path, tmp_path: Path) -> None:
    encoder = make_encoder("bert", tmp_path / "bert")
    with pytest.raises(ModelLoadError, match="--worker-listen isn't for an encoder"):
        async with open_mock_engine(encoder, tls):
            pass
