"""Front ends of other hosts in this program: what they serve, and what their loss leaves."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.front_ends.test_server import values
from tests.support.cut_network import open_network
from tests.support.http_stub import http_client, read_to_end
from tests.support.other_hosts import told
from tests.support.remote_front_ends import (
    TIMEOUT,
    EngineProcess,
    RemoteFrontEnd,
    open_engine_process,
    running_front_end,
)
from tests.support.tiny_models import make_tiny
from trioserve._util.pair_socket import PairSocket
from trioserve.front_ends.messages import (
    FrontEndListening,
    RpcCall,
    RpcReply,
    encode,
)
from trioserve.front_ends.remote import agent as agent_module
from trioserve.front_ends.remote.agent import FrontEndAgent
from trioserve.protocol import wire
from trioserve.workers.remote.certificates import make_certificates
from trioserve.workers.remote.link import PeerClock
from trioserve.workers.remote.tls import front_end_tls, worker_tls


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama2", tmp_path_factory.mktemp("model"), max_position_embeddings=8192)


@contextlib.asynccontextmanager
async def two_serving(
    model: Path, tls: Path
) -> AsyncIterator[tuple[EngineProcess, RemoteFrontEnd, RemoteFrontEnd]]:
    """Open an engine process and two front ends that serve."""
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tls, model) as first,
        running_front_end(engine.address, tls, model) as second,
    ):
        for each in (first, second):
            await each.wait_listening()
        await engine.wait_serving(2)
        yield engine, first, second


async def test_a_client_that_leaves_frees_what_its_request_held(model: Path, tls: Path) -> None:
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        texts = [(await front_end.complete())["choices"][0]["text"] for _ in range(2)]
        assert texts[0] == texts[1]
        clients = [await front_end.stream() for _ in range(3)]
        assert engine.engine_server.statistics().scheduler.num_running == 3
        for each in clients:
            await each.aclose()
        await engine.wait_nothing_held()


async def test_metrics_are_those_of_all(model: Path, tls: Path) -> None:
    async with two_serving(model, tls) as (engine, first, second):
        for each in (first, first, second):
            await each.complete()
        name = "trioserve:e2e_request_latency_seconds_count"
        assert (await values(second.url))[name] == 3
        first.life.cancel()
        await engine.wait_serving(1)
        counted = await values(second.url)
        assert counted[name] == 3
        assert counted["trioserve:front_end_restarts_total"] == 1
        async with http_client(second.url) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}


async def test_a_killed_front_end_takes_its_requests_along(model: Path, tls: Path) -> None:
    async with two_serving(model, tls) as (engine, first, second):
        lost, kept = await first.stream(), await second.stream(200)
        first.life.cancel()
        await engine.wait_serving(1)
        assert (await read_to_end(kept)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await engine.wait_nothing_held()
        await lost.aclose()


@pytest.mark.parametrize("how", ["closed", "silent"])
async def test_a_cut_network_ends_its_requests_and_it_joins_again(
    how: str, model: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        open_engine_process(model, tls) as engine,
        open_network(engine.address) as network,
        running_front_end(network.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        stream = await front_end.stream()
        if how == "closed":
            await network.close()
        else:
            network.hold()
        await engine.wait_serving(0)
        await engine.wait_nothing_held()
        # A client gets the usual last event, and new connections are refused.
        with trio.fail_after(TIMEOUT):
            last = (await read_to_end(stream)).split(b"data: ")[-1]
        assert json.loads(last.partition(b"\n\n")[0])["error"]["code"] == "shutting_down"
        await front_end.wait_refusing()
        network.open()
        network.flow()
        await front_end.wait_listening(2)
        await front_end.complete()
        assert told(caplog, "front end lost")


async def test_one_that_leaves_lets_its_requests_finish(model: Path, tls: Path) -> None:
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        stream = await front_end.stream(60)
        front_end.agent.leave()
        assert (await read_to_end(stream)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await front_end.wait_gone()
        assert (front_end.failure, front_end.agent.num_cut) == (None, 0)
        await engine.wait_serving(0)
        await engine.wait_nothing_held()


async def test_the_time_to_finish_is_bounded(model: Path, tls: Path) -> None:
    async with (
        open_engine_process(model, tls, shutdown_timeout=0.2) as engine,
        running_front_end(engine.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        stream = await front_end.stream()
        front_end.agent.leave()
        assert b"shutting_down" in await read_to_end(stream)
        await front_end.wait_gone()
        assert front_end.agent.num_cut == 1
        await engine.wait_nothing_held()


async def test_a_link_that_is_lost_meanwhile_is_counted(model: Path, tls: Path) -> None:
    async with (
        open_engine_process(model, tls) as engine,
        open_network(engine.address) as network,
        running_front_end(network.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        stream = await front_end.stream()
        front_end.agent.leave()
        await network.close()
        await front_end.wait_gone()
        assert (front_end.failure, front_end.agent.num_cut) == (None, 1)
        await stream.aclose()


async def test_a_server_that_ends_drains_them_and_the_next_gets_them(
    model: Path, tls: Path
) -> None:
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tls, model) as front_end,
    ):
        await front_end.wait_listening()
        stream = await front_end.stream(60)
        engine.drain()
        assert (await read_to_end(stream)).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await engine.wait_serving(0)
        assert engine.joined.num_cut == 0
        await engine.wait_nothing_held()
        assert not front_end.gone.is_set()


# ---- refusals


def other_file(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "other"}')


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


REFUSALS: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "a worker's certificate": (
        {"certificates": worker_tls},
        lambda _: None,
        "a front end needs a certificate for front-end.trioserve.internal; it has worker",
    ),
    "other weights": ({"checksum": "d" * 32}, lambda _: None, "give both the same MODEL"),
    "another template": ({}, other_file, "engine's host: tokenizer_config.json of MODEL. Put"),
    "no tokenizer": ({}, no_tokenizer, "engine's host: tokenizer.json of MODEL. Put"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_one_that_does_not_fit_is_told_why(
    name: str, model: Path, tls: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options, change, reason = REFUSALS[name]
    shutil.copytree(model, tmp_path / "model")
    change(tmp_path / "model")
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tls, tmp_path / "model", **options) as front_end,
    ):
        await front_end.wait_gone()
        assert reason in str(front_end.failure)
        await engine.until(lambda: bool(told(caplog, "refused") or told(caplog, "lost")))
        await served_here(engine, tls, model)


async def served_here(engine: EngineProcess, tls: Path, model: Path) -> None:
    """Assert that a front end can join and serve."""
    async with running_front_end(engine.address, tls, model) as front_end:
        await front_end.wait_listening()
        await front_end.complete()
    await engine.wait_nothing_held()


async def test_another_version_is_refused(
    model: Path, tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_engine_process(model, tls) as engine:
        monkeypatch.setattr(agent_module, "messages_hash", lambda: "other")
        async with running_front_end(engine.address, tls, model) as front_end:
            await front_end.wait_gone()
            assert "install the same version on both" in str(front_end.failure)


async def test_without_a_certificate_of_the_authority_there_is_no_link(
    model: Path, tls: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path / "other")
    async with (
        open_engine_process(model, tls) as engine,
        running_front_end(engine.address, tmp_path / "other", model) as front_end,
    ):
        await engine.until(lambda: bool(told(caplog, "no valid certificate of the same authority")))
        assert not front_end.urls
        await served_here(engine, tls, model)


async def test_an_engine_that_serves_http_itself_takes_none(model: Path, tls: Path) -> None:
    async with open_engine_process(model, tls) as engine:
        port = engine.engine_server.worker_group.port
        assert port is not None
        port.front_ends = None
        async with running_front_end(engine.address, tls, model) as front_end:
            await front_end.wait_gone()
            assert "start it with --api-server-count 2 or more" in str(front_end.failure)


# ---- hostile peers


def turn(number: int) -> bytes:
    return encode(RpcCall(number, "watch", [1, 5, 5]))


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"\xff" * 100],
        [wire.encode(wire.Quit())],
        [encode(RpcReply(1, fault=None))],
        [encode(FrontEndListening()), b"\x80"],
        [encode(FrontEndListening()), encode(FrontEndListening())],
        [encode(FrontEndListening()), encode(RpcCall(1, "no such call"))],
        [encode(FrontEndListening()), encode(RpcCall(1, "pause", {"a": 1}))],
        [encode(FrontEndListening()), turn(1), turn(2), b"\x80"],
    ],
    ids=range(9),
)
async def test_a_front_end_that_sends_garbage_loses_itself_only(
    messages: list[bytes], model: Path, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_engine_process(model, tls) as engine:
        peer = await PairSocket.dial_tls(engine.address, front_end_tls(str(tls)), lambda: None)
        join = FrontEndAgent(
            engine=engine.address,
            tls=front_end_tls(str(tls)),
            model=str(model),
            checksum=engine.checksum,
            config=engine.config,
            on_listening=lambda _: None,
        ).join_message()
        await peer.send(wire.encode(attrs.evolve(join, id="hostile")))
        for data in messages:
            await peer.send(data)
        await engine.until(lambda: bool(told(caplog, "front end lost")))
        peer.close()
        await engine.wait_serving(0)
        await served_here(engine, tls, model)


def test_the_quickest_answers_tell_the_clock() -> None:
    clock = PeerClock()
    for sent, trip, there in ((10.0, 0.4, 0.3), (11.0, 0.002, 0.001), (12.0, 0.9, 0.1)):
        clock.note(sent, sent + trip, sent + there - 5.0)
        assert abs(clock.offset - 5.0) <= trip / 2
    assert clock.offset == pytest.approx(5.0)
    for number in range(20):  # the clocks drift apart, and old answers are forgotten
        clock.note(20.0 + number, 20.01 + number, 20.005 + number - 6.0)
    assert clock.offset == pytest.approx(6.0)
