"""The private folder of a link's socket, which is always removed.

The socket has a name in the file system until the worker has connected to it. If an engine is
killed before that, the next start removes the folder. The owner of a folder holds a lock on a file
in it, and the system releases the lock when the process ends in any way. A folder with a free lock
has no owner.
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
"""Longest path of a socket, in bytes."""
_LOCK = "lock"
_ATTEMPTS = 10
"""Attempts to make a folder. A second one is needed only if another engine sweeps at that moment.
"""


@attrs.define(eq=False)
class SocketFolder:
    """A folder that exists until it is closed."""

    path: str
    _lock: int | None
    """Descriptor that holds the lock."""

    @classmethod
    def make(cls) -> SocketFolder:
        """Make a folder for the socket in the folder for temporary files.

        Raises:
            NoRoomForWorker: The folder can't be made; one line says why.
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
        """Address to listen at and to dial."""
        return f"ipc://{self.path}/{_SOCKET}"

    def close(self) -> None:
        """Remove the folder; an existing connection goes on without it. Idempotent."""
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
    """Return the lock of a new folder; None if a sweep has removed the folder meanwhile."""
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
        # A file system without locks refuses them to sweeping engines, too.
        return lock
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(name), os.fstat(lock)):
            return lock
    os.close(lock)
    return None


def sweep_socket_folders() -> None:
    """Remove the folders that killed engines of this user have left. It blocks on the disk.

    A folder stays if it belongs to another user, is in use or contains other files.
    """
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep(entry.path)


def _sweep(path: str) -> None:
    """Remove a folder without an owner; raise ``OSError`` if it must not be touched."""
    # By descriptor, so that the checked folder is emptied even if its name changes meanwhile.
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
            for name in sorted(names, reverse=True):  # The lock goes last.
                os.unlink(name, dir_fd=folder)
        # A folder without a lock was just being made; only an empty one is removed.
        os.rmdir(path)
