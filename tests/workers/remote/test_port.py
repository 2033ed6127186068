"""The port for workers of other hosts: which peers may join; hostile bytes do nothing."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import pytest
import trio

from tests.fuzz.target import mutations
from tests.protocol.test_wire import MESSAGES
from tests.support.other_hosts import told
from trioserve import EngineConfig
from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.engine.worker_start import start_message
from trioserve.protocol import wire
from trioserve.protocol.certificates import ENGINE_NAME
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.joining import Join, JoinRefusal, LinkHeartbeat
from trioserve.workers.remote import joined as joined_module
from trioserve.workers.remote import port as port_module
from trioserve.workers.remote.certificates import make_certificates
from trioserve.workers.remote.joined import JoinedWorker, JoinedWorkers
from trioserve.workers.remote.link import RemoteLink
from trioserve.workers.remote.port import MAX_BEFORE_JOIN, WorkersPort
from trioserve.workers.remote.tls import engine_tls, worker_tls

CHECKSUM = "c" * 32
JOIN = Join(
    role="worker",
    protocol=wire.PROTOCOL_VERSION,
    schema=wire.schema_hash(),
    version="1",
    id="agent",
    host="other",
    checksum=CHECKSUM,
)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


@contextlib.asynccontextmanager
async def listening(tls: Path) -> AsyncIterator[tuple[str, list[JoinedWorker]]]:
    """Open a port; at the end, a worker that joins must still be taken."""
    joined: list[JoinedWorker] = []
    start = start_message(EngineConfig("model"), Path("model"))
    port = WorkersPort(
        address="127.0.0.1:0",
        tls=engine_tls(str(tls)),
        timeout=1.0,
        checksum=CHECKSUM,
        workers=JoinedWorkers(start, 5.0, joined.append),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(port.run)
        yield port.bound, joined
        before = len(joined)
        with trio.fail_after(20):
            peer = await dial(port.bound, tls)
            await peer.send(wire.encode(attrs.evolve(JOIN, id="last")))
            while len(joined) == before:
                await trio.sleep(0.01)
        assert joined[-1].id == "last"
        nursery.cancel_scope.cancel()


async def dial(address: str, tls: Path) -> PairSocket:
    return await PairSocket.dial_tls(address, worker_tls(str(tls)), lambda: None)


async def wait_told(caplog: pytest.LogCaptureFixture, text: str, times: int = 1) -> None:
    with trio.fail_after(20):
        while len(told(caplog, text)) < times:
            await trio.sleep(0.01)
    assert len(told(caplog, text)) == times


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(70000)],
    ids=["nothing", "zero", "http", "long hello"],
)
async def test_a_peer_without_tls_gets_nothing(
    data: bytes, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(tls) as (address, joined):
        host, _, number = address.rpartition(":")
        stream = await trio.open_tcp_stream(host, int(number))
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(data)
            await stream.send_eof()
            with trio.fail_after(20):
                answer = await stream.receive_some()
            assert len(answer) <= 7, "more than an alert of TLS"
        await stream.aclose()
        await wait_told(caplog, "peer refused")
        assert joined == []


async def test_a_peer_without_a_certificate_gets_nothing(
    tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(tls / "ca.crt"))
    async with listening(tls) as (address, joined):
        host, _, number = address.rpartition(":")
        with pytest.raises((trio.BrokenResourceError, ssl.SSLError)):
            stream = trio.SSLStream(
                await trio.open_tcp_stream(host, int(number)), context, server_hostname=ENGINE_NAME
            )
            await stream.do_handshake()
            await stream.send_all(wire.encode(JOIN))
            await stream.receive_some()
            raise trio.BrokenResourceError("closed")
        await wait_told(caplog, "peer refused")
        assert joined == []


async def test_a_silent_peer_is_dropped(
    tls: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "FIRST_TIMEOUT", 0.2)
    async with listening(tls) as (address, _):
        peer = await dial(address, tls)
        await wait_told(caplog, "it didn't join within 0.2 s")
        peer.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"garbage", "isn't Join"),
        (b"\xff" * 100, "isn't Join"),
        (b"\x80\x04\x95", "isn't Join"),
        (wire.encode(JOIN)[:-3], "isn't Join"),
        (wire.encode(LinkHeartbeat(number=1))[:1], "invalid message"),
        (wire.encode(wire.Quit()), "isn't Join"),
        (bytes(MAX_BEFORE_JOIN), "sent more than 64 KiB before it joined"),
        (wire.encode(attrs.evolve(JOIN, protocol=99)), "install the same version on both"),
        (wire.encode(attrs.evolve(JOIN, schema="x")), "install the same version on both"),
        (wire.encode(attrs.evolve(JOIN, checksum="d" * 32)), "give both the same MODEL"),
        (wire.encode(attrs.evolve(JOIN, id="")), "characters"),
        (wire.encode(attrs.evolve(JOIN, host="h" * 256)), "characters"),
    ],
)
async def test_a_peer_with_a_certificate_that_does_not_join_loses_itself_only(
    data: bytes, reason: str, tls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(tls) as (address, joined):
        peer = await dial(address, tls)
        await peer.send(data)
        await wait_told(caplog, "peer refused")
        assert told(caplog, reason), caplog.messages
        assert joined == []
        peer.close()


async def test_a_refused_peer_is_told_why(tls: Path) -> None:
    async with listening(tls) as (address, _):
        peer = await dial(address, tls)
        await peer.send(wire.encode(attrs.evolve(JOIN, checksum="d" * 32)))
        with trio.fail_after(20):
            while wire.has_tag(data := await peer.receive(), LinkHeartbeat):
                pass
        refusal = wire.decode(data)
        assert isinstance(refusal, JoinRefusal)
        assert refusal.final
        assert "d" * 32 in refusal.reason
        peer.close()


async def test_a_joined_peer_that_sends_garbage_loses_itself_only(tls: Path) -> None:
    async with listening(tls) as (address, joined):
        peer = await dial(address, tls)
        await peer.send(wire.encode(JOIN))
        with trio.fail_after(20):
            while not joined:
                await trio.sleep(0.01)
            with pytest.raises(Exception, match="it sent an invalid message"):
                await peer.send(b"\xff" + os.urandom(100))
                async with joined[0].open():
                    raise AssertionError("it has loaded nothing")
        peer.close()


async def test_damaged_messages_end_their_own_link_only(tls: Path) -> None:
    """Peers with a certificate send damaged messages of all kinds; every second one has joined."""
    damaged = mutations([wire.encode(each) for each in (JOIN, *MESSAGES)], 72)
    async with listening(tls) as (address, joined):
        for number, messages in enumerate(zip(*[damaged] * 3, strict=True)):
            peer, id = await dial(address, tls), f"agent {number}"
            if number % 2:
                await peer.send(wire.encode(attrs.evolve(JOIN, id=id)))
                with trio.fail_after(20):
                    while not any(each.id == id for each in joined):
                        await trio.sleep(0.001)
            with trio.move_on_after(1), contextlib.suppress(SocketFailed):
                for data in messages:
                    await peer.send(data)
            if number % 2:
                (worker,) = (each for each in joined if each.id == id)
                with trio.move_on_after(0.05), contextlib.suppress(TrioserveError):
                    async with worker.open():
                        pass
            else:
                await trio.sleep(0.02)
            peer.close()


async def test_too_long_a_message_is_not_even_received(
    tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 1 << 20)
    async with listening(tls) as (address, joined):
        peer = await dial(address, tls)
        await peer.send(wire.encode(JOIN))
        with trio.fail_after(20):
            while not joined:
                await trio.sleep(0.01)
            with pytest.raises(Exception, match="a message of more than 1 MiB"):
                await peer.send(bytes(2 << 20))
                async with joined[0].open():
                    raise AssertionError("it has loaded nothing")
        peer.close()


async def test_many_that_do_not_join_leave_room_for_those_that_wait(
    tls: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "MAX_JOINING", 2)
    async with listening(tls) as (address, _):
        host, _, number = address.rpartition(":")
        streams = [await trio.open_tcp_stream(host, int(number)) for _ in range(5)]
        await wait_told(caplog, "too many connections don't join", 3)
        for each in streams:
            await each.aclose()
        await wait_told(caplog, "before it had shown a certificate", 2)


async def test_an_agent_that_joins_again_takes_its_own_place(tls: Path) -> None:
    async with listening(tls) as (address, joined):
        peers = []
        for _ in range(2):
            peers.append(await dial(address, tls))
            await peers[-1].send(wire.encode(JOIN))
            with trio.fail_after(20):
                while not joined:
                    await trio.sleep(0.01)
        first = joined[0]._link
        with trio.fail_after(20):
            while joined[0]._link is first:
                await trio.sleep(0.01)
        assert len(joined) == 1
        joined[0].dismiss("it was removed")
        peers.append(await dial(address, tls))
        await peers[-1].send(wire.encode(JOIN))
        with trio.fail_after(20):
            while wire.has_tag(data := await peers[-1].receive(), LinkHeartbeat):
                pass
        assert wire.decode(data) == JoinRefusal(reason="it was removed", final=True)
        for each in peers:
            each.close()


async def test_an_address_that_can_not_be_used_is_named(tls: Path) -> None:
    async with listening(tls) as (address, _):
        port = WorkersPort(
            address=address,
            tls=engine_tls(str(tls)),
            timeout=1.0,
            checksum="",
            workers=JoinedWorkers(start_message(EngineConfig("m"), Path("m")), 1.0),
        )
        with pytest.raises(TrioserveError, match=r"Address already in use.*--worker-listen"):
            await port.run()


async def test_agents_that_were_refused_take_no_place(
    tls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_module, "MAX_WORKERS", 2)
    workers = JoinedWorkers(start_message(EngineConfig("model"), Path("model")), 5.0)
    joined: list[JoinedWorker] = []
    workers.on_new = joined.append
    link = RemoteLink(PairSocket.listen_tls(engine_tls(str(tls))))

    def join(id: str) -> str | None:
        asked = attrs.evolve(JOIN, id=id)
        obstacle = workers.obstacle(asked)
        if obstacle is None:
            workers.take(asked, link)
        return obstacle

    for number in range(5):
        assert join(f"refused {number}") is None
        joined[-1].dismiss("it can't load the model")
    assert [join(id) for id in ("a", "b")] == [None, None]
    assert join("c") == "the engine has 2 workers of other hosts, which is the limit"
    assert join("refused 4") == "it can't load the model"
    assert join("a") is None
    assert len(joined) == 7
    link.socket.close()
