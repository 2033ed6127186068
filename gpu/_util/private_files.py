"""Files that no other user of the machine could have put there: what may be loaded as code."""

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
    """Other users can change a file, or put another one in its place: one line."""


def check_private(path: Path) -> None:
    """Refuse ``path`` unless this user and root alone can change it.

    That holds for the file, for every folder on the way to it and for symbolic links among them:
    each belongs to this user or root and is closed to others. In a folder like ``/tmp``, others
    can't change what belongs to this user.

    Raises:
        NotPrivateError: others can.
        OSError: there is no such file.
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
    """Make ``folder`` and what is missing above it, closed to others, and check that it is so.

    Raises:
        NotPrivateError: it is there, and others can change it.
        OSError: it can't be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def _way_to(path: Path) -> Iterator[Path]:
    """Yield the root and every step from it to ``path``, with symbolic links and their targets."""
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
    """Return whether the group holds this user alone, as where each user has one."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    is_main = user.pw_gid == group_id and user.pw_name == group.gr_name
    return is_main and set(group.gr_mem) <= {user.pw_name}
