"""A full disk where the workers' sockets are, while the worker is killed.

``python -m bench.faults.full_disk``. The server runs in a mount namespace of its own, with a tmpfs
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

from bench.faults.kills import Kill, Kills, Scenario, requests_for
from bench.faults.results import RESULTS, markdown, save
from bench.faults.server import serving
from bench.faults.stage import tiny_model

_MOUNT = 'mount -t tmpfs -o size=64k,nr_inodes=8 tmpfs "$0" && exec "$@"'
_WAYS = (
    ("mount namespace", ("unshare", "--mount")),
    ("user and mount namespace", ("unshare", "--user", "--map-root-user", "--mount")),
)


def small_disk(folder: Path) -> tuple[str, list[str]] | None:
    """How, and the command that starts another one with a small disk of its own at ``folder``.

    None if this user may not mount anything, as in many containers.
    """
    for name, unshare in _WAYS:
        command = [*unshare, "sh", "-c", _MOUNT, str(folder)]
        with contextlib.suppress(FileNotFoundError):
            if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                return name, command
    return None


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Nothing more can be created in ``folder`` meanwhile.

    Raises:
        RuntimeError: there is room for a thousand files: this is no small disk.
    """
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
    """Kills while there is no room for ``seconds_full``."""

    folder: Path
    """As this process sees the server's folder."""
    seconds_full: float

    async def disturb(self) -> Kill:
        with trio.fail_after(300):
            with filled(self.folder):
                killed = await self.kill()
                await trio.sleep(self.seconds_full)
                assert self.subject.worker() is None, "a worker was started without room"
            return await self.recovery(killed)


async def full_disk(model: str, rounds: int, seconds_full: float, clients: int) -> dict[str, Any]:
    """Kill the worker ``rounds`` times, each time with a disk full for so long; the figures.

    Raises:
        RuntimeError: this user may not mount anything.
    """
    scenario = Scenario(
        kills=rounds, clients=clients, requests=2 * clients, output_tokens=64, mean_interval=0.5
    )
    requests = requests_for(scenario)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        small = small_disk(Path(folder))
        if small is None:
            raise RuntimeError("no tmpfs can be mounted here, even in a namespace of its own")
        way, prefix = small
        options = ("--dtype", "float32", "--num-threads", "1")
        served = serving(*options, model=model, environment={"TMPDIR": folder}, prefix=prefix)
        async with served as subject:
            seen = Path(f"/proc/{subject.pid}/root{folder}")
            run = _FullDisk(
                scenario=scenario,
                subject=subject,
                requests=requests,
                folder=seen,
                seconds_full=seconds_full,
            )
            await run.run()
            await subject.wait_idle()
            left = [path.name for path in seen.iterdir()]
    outcomes = run.outcomes()
    differing = sum(outcome.difference is not None for outcome in outcomes)
    return {
        "way": way,
        "kills_with_a_full_disk": len(run.kills),
        "seconds_full": seconds_full,
        "requests_answered": len(outcomes),
        "requests_lost": sum(run.lost().values()),
        "lost": dict(run.lost()),
        "answers_that_differ": differing,
        "left_in_the_folder": left,
        "passed": not run.lost() and not differing and not left,
    }


def table(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        ("how the disk was made small", f"a tmpfs in a {figures['way']}"),
        ("kills with a full disk", figures["kills_with_a_full_disk"]),
        ("each full for, s", figures["seconds_full"]),
        ("requests answered", figures["requests_answered"]),
        ("requests lost", figures["requests_lost"]),
        ("answers that differ", figures["answers_that_differ"]),
    ]
    return markdown(("full disk", ""), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the disk, print the table and save the record. 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.full_disk", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds-full", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        figures = trio.run(full_disk, model, given.rounds, given.seconds_full, given.clients)
    print(table(figures))
    for error, count in figures["lost"].items():
        print(f"lost {count}: {error}")
    print(f"saved {save(RESULTS, 'full_disk', vars(given), figures)}")
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
