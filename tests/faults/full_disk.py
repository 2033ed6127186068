"""A full disk where the workers' sockets are, while the worker is killed.

``python -m tests.faults.full_disk``. The server runs in a mount namespace of its own, with a tmpfs
of a few inodes as its folder for temporary files (Linux's ``unshare``; a user namespace where the
user isn't root). The folder is filled and the worker killed under load. No new one can be started
until there is room again; then everything goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from bench.report import Made, run_script
from tests.faults.kills import Kill, Kills, Scenario
from tests.faults.stage import model_named, serving, verdict_of, worker_of

_MOUNT = 'mount -t tmpfs -o size=64k,nr_inodes=8 tmpfs "$0" && exec "$@"'
_WAYS = {
    "mount namespace": ("unshare", "--mount"),
    "user and mount namespace": ("unshare", "--user", "--map-root-user", "--mount"),
}


def small_disk(folder: Path) -> tuple[str, list[str]] | None:
    """Return how, and the command that starts another one with a small disk at ``folder``.

    None if this user may not mount anything, as in many containers.
    """
    for name, unshare in _WAYS.items():
        command = [*unshare, "sh", "-c", _MOUNT, str(folder)]
        with contextlib.suppress(FileNotFoundError):
            if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                return name, command
    return None


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fill ``folder``, which has room for few files, so that nothing more can be created in it."""
    made: list[Path] = []
    try:
        for number in range(1000):
            path = folder / f"filler-{number}"
            try:
                path.touch()
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
            made.append(path)
        else:
            raise RuntimeError(f"{folder} doesn't get full")
        yield
    finally:
        for path in made:
            path.unlink(missing_ok=True)


@attrs.define(kw_only=True)
class _FullDisk(Kills):
    """Kills while there is no room for ``seconds_full`` in the server's folder."""

    folder: Path
    seconds_full: float

    async def disturb(self) -> Kill:
        with trio.fail_after(300):
            with filled(self.folder):
                killed = await self.kill()
                await trio.sleep(self.seconds_full)
                assert worker_of(self.subject.pid) is None, "a worker was started without room"
            return await self.recovery(killed)


async def full_disk(
    model: str, rounds: int, seconds_full: float, clients: int
) -> tuple[dict[str, Any], bool]:
    """Kill the worker ``rounds`` times with a full disk; return the figures, and whether good."""
    scenario = Scenario(
        kills=rounds, clients=clients, requests=2 * clients, output_tokens=64, mean_interval=0.5
    )
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        small = small_disk(Path(folder))
        if small is None:
            raise RuntimeError("no tmpfs can be mounted here, even in a namespace of its own")
        way, prefix = small
        options = ("--dtype", "float32", "--num-threads", "1")
        served = serving(*options, model=model, environment={"TMPDIR": folder}, prefix=prefix)
        async with served as subject:
            seen = Path(f"/proc/{subject.pid}/root{folder}")
            how = {"folder": seen, "seconds_full": seconds_full}
            run = _FullDisk(scenario=scenario, subject=subject, **how)
            await run.run()
            await subject.wait_idle()
            left = [path.name for path in seen.iterdir()]
    outcomes = run.outcomes()
    differing = sum(outcome.difference is not None for outcome in outcomes)
    figures = {
        "how the disk was made small": f"a tmpfs in a {way}",
        "kills with a full disk": len(run.kills),
        "each full for, s": seconds_full,
        "requests answered": len(outcomes),
        "requests lost": sum(run.lost().values()),
        "answers that differ": differing,
        "left in the folder": len(left),
    }
    return figures, not run.lost() and not differing and not left


def measure(options: argparse.Namespace) -> Made:
    """Return the figures as a table."""
    how = (options.rounds, options.seconds_full, options.clients)
    with model_named("tiny") as model:
        figures, good = trio.run(full_disk, model, *how)
    return verdict_of("full disk", figures, good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the disk; return 1 if anything was lost."""
    options = {"rounds": 5, "seconds_full": 3.0, "clients": 4}
    return run_script("faults_full_disk", measure, arguments, **options)


if __name__ == "__main__":
    raise SystemExit(main())
