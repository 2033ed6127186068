"""The folder of a link's socket, which only this user can enter, and which outlives nobody.

The socket has a name in the file system until the worker has connected to it. An engine that is
killed before that can't take the name away, so the next start does: whoever makes a folder holds a
lock on a file in it, which the system lets go of when the process is gone, however it went. A
folder whose lock is free is nobody's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile

import attrs

from trioserve.protocol.errors import NoRoomForWorker

_PREFIX = "trioserve-worker-"
_SOCKET = "link"
_LONGEST_PATH = 107
"""Bytes that the system takes for a socket's name."""
_LOCK = "lock"
_ATTEMPTS = 10
"""More than once only beside an engine that starts at the same moment, and sweeps."""


@attrs.define(eq=False)
class SocketFolder:
    """A folder that is there until it is closed."""

    path: str
    _lock: int | None
    """The descriptor that holds the lock."""

    @classmethod
    def make(cls) -> SocketFolder:
        """Make one where temporary files go.

        Raises:
            NoRoomForWorker: it can't be made there; one line says why.
        """
        try:
            for _ in range(_ATTEMPTS):
                path = tempfile.mkdtemp(prefix=_PREFIX)
                lock = _lock_new(path)
                if lock is not None:
                    break
        except OSError as error:
            raise NoRoomForWorker(
                f"there is no place for the worker's socket in {_place()}: "
                f"{error.strerror or error} (TMPDIR names another)"
            ) from error
        if lock is None:
            raise NoRoomForWorker(f"folders for the worker's socket are swept away in {_place()}")
        folder = cls(path, lock)
        if len(os.fsencode(os.path.join(path, _SOCKET))) > _LONGEST_PATH:
            folder.close()
            raise NoRoomForWorker(
                f"the name of the folder for temporary files, {_place()}, is too long for a socket "
                "in it (TMPDIR names another)"
            )
        return folder

    @property
    def url(self) -> str:
        """The address to listen at and to dial."""
        return f"ipc://{self.path}/{_SOCKET}"

    def close(self) -> None:
        """Take the folder away; a connection that exists goes on without it. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        for name in (_SOCKET, _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        os.close(lock)


def _place() -> str:
    return tempfile.tempdir or "any folder for temporary files"


def _lock_new(path: str) -> int | None:
    """The lock of a folder that was made just now; None if a sweep has taken it away meanwhile."""
    name = os.path.join(path, _LOCK)
    try:
        lock = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    except OSError:
        os.rmdir(path)
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        # A file system that knows no locks refuses them to who sweeps, too.
        return lock
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(name), os.fstat(lock)):
            return lock
    os.close(lock)
    return None


def sweep_socket_folders() -> None:
    """Take away what engines of this user have left that were killed. Blocks on the disk.

    A folder of another user, one that is in use and one in which there is anything else stays.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep(entry.path)


def _sweep(path: str) -> None:
    """Take one folder away if it is nobody's; raises ``OSError`` where it is not to be touched."""
    # What was looked at is what is emptied, whatever the name has come to mean.
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, folder)
        names = os.listdir(folder)
        if os.fstat(folder).st_uid != os.geteuid() or not {*names} <= {_SOCKET, _LOCK}:
            return
        if _LOCK in names:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in sorted(names, reverse=True):  # The lock is the last to go.
                os.unlink(name, dir_fd=folder)
        # Only an empty one goes: without a lock it is one that was being made.
        os.rmdir(path)
