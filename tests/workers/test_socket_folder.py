"""The folder of a worker's socket: a killed engine leaves it, the next start removes it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from trioserve.protocol.errors import WorkerLost
from trioserve.workers.socket_folder import SocketFolder, sweep_socket_folders

ROOT = Path(__file__).parents[2]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def listen(folder: SocketFolder) -> None:
    """Leave a socket's file in it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(folder.url.removeprefix("ipc://"))


def killed_after(program: str, temporary: Path) -> None:
    """Run a program that kills itself."""
    code = (
        "import os\n"
        "from trioserve.workers.link import NngLink\n"
        "from trioserve.workers.socket_folder import SocketFolder\n"
        f"{program}\nos.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=180)
    assert done.returncode == -signal.SIGKILL


def test_it_is_there_until_it_is_closed(temporary: Path) -> None:
    folder = SocketFolder.make()
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    listen(folder)
    assert sorted(os.listdir(folder.path)) == ["link", "lock"]
    folder.close()
    folder.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "program", ["folder = SocketFolder.make(); NngLink.listen(folder.url)", "SocketFolder.make()"]
)
def test_what_a_killed_process_has_left_is_swept(program: str, temporary: Path) -> None:
    killed_after(program, temporary)
    assert len(list(temporary.iterdir())) == 1
    live = SocketFolder.make()
    listen(live)
    sweep_socket_folders()
    assert [str(path) for path in temporary.iterdir()] == [live.path]
    live.close()


def test_one_that_was_not_finished_is_swept(temporary: Path) -> None:
    """Remove a folder without a lock: its maker was killed before there was one."""
    tempfile.mkdtemp(prefix="trioserve-worker-")
    sweep_socket_folders()
    assert list(temporary.iterdir()) == []


def test_what_is_not_ours_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (temporary / "trioserve-worker-link").symlink_to(elsewhere)
    (temporary / "trioserve-worker-file").write_text("a file")
    (temporary / "trioserve-notes").mkdir()
    with_more = temporary / "trioserve-worker-more"
    with_more.mkdir()
    for name in ("lock", "link", "precious"):
        (with_more / name).touch()
    linked_lock = temporary / "trioserve-worker-lock"
    linked_lock.mkdir()
    (linked_lock / "lock").symlink_to(elsewhere / "lock")
    sockets_only = temporary / "trioserve-worker-sock"
    sockets_only.mkdir()
    (sockets_only / "link").touch()
    before = sorted(temporary.rglob("*"))
    sweep_socket_folders()
    assert sorted(temporary.rglob("*")) == before
    os.unlink(with_more / "precious")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep_socket_folders()  # now another user's
    assert (with_more / "lock").exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sweep_socket_folders()
    assert not with_more.exists()


def test_sweeping_takes_nothing_from_those_who_start_at_the_same_time(temporary: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweep_socket_folders()

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for thread in sweepers:
        thread.start()
    try:
        for _ in range(300):
            folder = SocketFolder.make()
            assert os.path.exists(os.path.join(folder.path, "lock"))
            folder.close()
    finally:
        stop.set()
        for thread in sweepers:
            thread.join()
    sweep_socket_folders()
    assert list(temporary.iterdir()) == []


class TestNoRoom:
    """Each is one line, and what a lost worker is: the supervisor tries again."""

    def test_there_is_no_such_folder(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
        sweep_socket_folders()
        with pytest.raises(WorkerLost) as caught:
            SocketFolder.make()
        assert str(caught.value) == (
            f"there is no place for the worker's socket in {temporary}/gone: "
            "No such file or directory (TMPDIR names another)"
        )

    def test_the_disk_is_full(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object, **__: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(WorkerLost, match="No space left on device"):
            SocketFolder.make()
        monkeypatch.undo()
        assert list(temporary.iterdir()) == []

    def test_the_path_is_too_long(self, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        deep = temporary / ("d" * 100)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(WorkerLost) as caught:
            SocketFolder.make()
        assert str(caught.value) == (
            f"the name of the folder for temporary files, {deep}, is too long for a socket in it "
            "(TMPDIR names another)"
        )
        assert list(deep.iterdir()) == []

    def test_a_path_just_short_enough(
        self, temporary: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rest = len("/trioserve-worker-xxxxxxxx/link")
        base = Path(tempfile.mkdtemp(dir="/tmp"))
        longest = base / ("d" * (107 - rest - len(f"{base}/")))
        try:
            longest.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(longest))
            with contextlib.closing(SocketFolder.make()) as folder:
                assert len(folder.url) == len("ipc://") + 107
                listen(folder)
        finally:
            shutil.rmtree(base)
