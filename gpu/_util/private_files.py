"""Checks that no other user of the machine can change a file that is loaded as code."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

_MAX_LINKS = 40
_OTHERS_WRITE = stat.S_IWOTH | stat.S_IWGRP


class NotPrivateError(OSError):
    """Other users can change or replace a file. The message is one line."""


def check_private(path: Path) -> None:
    """Refuse ``path`` unless only this user and root can change it.

    The file, every folder on its path and every symbolic link must belong to this user or root and
    must not be writable by others. A folder with the sticky bit, such as ``/tmp``, is accepted,
    because others can't replace this user's files in it.

    Raises:
        NotPrivateError: another user can change it.
        OSError: the file doesn't exist.
    """
    for step in _way_to(path):
        status = step.lstat()
        if status.st_uid not in (os.geteuid(), 0):
            raise NotPrivateError(f"{step} belongs to another user (id {status.st_uid})")
        is_shared_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if stat.S_ISLNK(status.st_mode) or (is_shared_folder and step != path):
            continue
        open_to = status.st_mode & _OTHERS_WRITE
        if open_to == stat.S_IWGRP and _is_own_group(status.st_gid):
            continue
        if open_to:
            raise NotPrivateError(f"other users can write to {step} (chmod go-w closes it)")


def make_private_folder(folder: Path) -> None:
    """Create ``folder`` and its missing parents with mode 0700, and check that it is private.

    Raises:
        NotPrivateError: another user can change it.
        OSError: it can't be created.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def _way_to(path: Path) -> Iterator[Path]:
    """Yield every folder from the root to ``path``, including symbolic links and their targets."""
    left = list(reversed(path.absolute().parts[1:]))
    reached = Path("/")
    num_links = 0
    yield reached
    while left:
        part = left.pop()
        if part == "..":
            reached = reached.parent
            continue
        step = reached / part
        yield step
        if not step.is_symlink():
            reached = step
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()
        if target.is_absolute():
            reached = Path("/")
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)


def _is_own_group(group_id: int) -> bool:
    """Return whether this user is the group's only member, as with one group for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    is_main = user.pw_gid == group_id and user.pw_name == group.gr_name
    return is_main and set(group.gr_mem) <= {user.pw_name}
