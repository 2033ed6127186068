"""The certificates that ``trioserve worker-certificates`` makes, and what nng's TLS takes."""

from __future__ import annotations

import builtins
import datetime
import stat
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509

from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.protocol.certificates import ENGINE_FILES, FRONT_END_FILES, WORKER_FILES
from trioserve.protocol.errors import TrioserveError
from trioserve.workers.remote.certificates import make_certificates, new_credentials
from trioserve.workers.remote.tls import engine_tls, worker_tls


def test_keys_are_private_and_certificates_last_for_years(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "new" / "tls")
    assert {path.name for path in made} == {
        *ENGINE_FILES,
        *WORKER_FILES,
        *FRONT_END_FILES,
        "ca.key",
    }
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {modes[name] for name in modes if name.endswith(".key")} == {0o600}
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=9 * 365)
    for path in made:
        if path.suffix == ".crt":
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            assert certificate.not_valid_after_utc > later


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = (tmp_path / "ca.key").read_bytes()
    with pytest.raises(TrioserveError, match="isn't empty: name a new folder"):
        make_certificates(tmp_path)
    assert (tmp_path / "ca.key").read_bytes() == before
    with pytest.raises(TrioserveError, match="can't write to"):
        make_certificates(tmp_path / "ca.key" / "below")


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TrioserveError, match=r"install trioserve\[tls\]"):
        make_certificates(tmp_path / "tls")


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / "worker.crt").unlink()
    with pytest.raises(TrioserveError, match=r"can't read .*worker.crt: No such file"):
        worker_tls(str(tmp_path))
    (tmp_path / "engine.key").write_text("nothing")
    with pytest.raises(TrioserveError, match=r"engine\.key are no authority's certificate"):
        engine_tls(str(tmp_path))
    (tmp_path / "engine.key").write_bytes(b"\xff")
    with pytest.raises(TrioserveError, match="it isn't text"):
        engine_tls(str(tmp_path))


def test_a_key_is_not_shown() -> None:
    assert repr(new_credentials()) == "(Credentials(), Credentials())"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Certificates of two authorities."""
    ours, others = (tmp_path_factory.mktemp(name) for name in ("ours", "others"))
    for folder in (ours, others):
        make_certificates(folder)
    return ours, others


async def connects(engine: Path, worker: Path) -> bool:
    listening = PairSocket.listen_tls(engine_tls(str(engine)))
    address = f"127.0.0.1:{listening.port}"
    try:
        with trio.fail_after(20):
            dialed = await PairSocket.dial_tls(address, worker_tls(str(worker)), lambda: None)
            await dialed.send(b"message")
            assert await listening.receive() == b"message"
    except SocketFailed:
        return False
    finally:
        listening.close()
    dialed.close()
    return True


async def test_both_sides_want_a_certificate_of_their_authority(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    ours, others = folders
    assert await connects(ours, ours)
    assert not await connects(ours, others)
    assert not await connects(others, ours)


@pytest.mark.parametrize("thief", ["worker", "engine"])
async def test_a_certificate_is_good_for_one_side_only(
    thief: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A worker's key that was stolen makes no engine, and an engine's no worker."""
    ours, _ = folders
    victim = "engine" if thief == "worker" else "worker"
    for name in ("ca.crt", f"{thief}.crt", f"{thief}.key"):
        data = (ours / name).read_bytes()
        (tmp_path / name.replace(thief, victim)).write_bytes(data)
    ends = {"engine": ours, "worker": ours, victim: tmp_path}
    assert not await connects(ends["engine"], ends["worker"])
