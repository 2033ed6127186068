"""Runs the stages of a part within its time, and saves what there is as it grows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.lease.plan import ROOT, SECONDS, Stage, Step, deadline

_TICK = 0.25
SAVE_EVERY = 10.0
"""Seconds between two archives while a step runs: what a killed call loses at most."""
# A child ends by itself so long before it would be ended.
_CHILD_RESERVE = 8.0


class Process(Protocol):
    """A running command."""

    def poll(self) -> int | None:
        """Return the exit status; None while the command runs."""

    def end(self) -> None:
        """End the command and all that it started."""


class World(Protocol):
    """A clock and processes: the machine's own, or those of a test."""

    def now(self) -> float:
        """Return seconds of a clock that never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start ``command``, its output in ``log``.

        Raises:
            OSError: there is no such program.
        """


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a step: ``ok``, ``failed``, ``out of time`` or ``not run``."""

    stage: str
    step: Step
    verdict: str
    seconds: float = 0.0


def log_name(stage: Stage, step: Step) -> str:
    """Return the file name of a step's log."""
    return f"{stage.name}-{step.name}.log".replace(" ", "-")


def processes(stage: Stage, cores: int) -> int:
    """Return how many steps of ``stage`` run at once: each has two cores at least."""
    return max(1, min(stage.at_once, cores // 2))


def run_stages(
    stages: Sequence[Stage],
    world: World,
    *,
    end: float,
    cores: int,
    logs: Path,
    save: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """Run ``stages`` in order, over at ``end`` of the world's clock.

    A step that fails or has no time left doesn't stop those behind it. ``save`` gets the outcomes
    so far after each step, and every few seconds between.
    """
    runner = _Runner(world, logs, save)
    with runner.ending_all():
        for stage in stages:
            if stage.background:
                for step in stage.steps:
                    runner.start(stage, step, end)
        for number, stage in enumerate(stages):
            until = deadline(stages, number, world.now(), end)
            runner.run(stage, until, processes(stage, cores))
    return runner.outcomes


@dataclass(kw_only=True, eq=False)
class _Running:
    stage: Stage
    step: Step
    process: Process
    began: float


class _Runner:
    def __init__(self, world: World, logs: Path, save: Callable[[Sequence[Outcome]], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._world = world
        self._logs = logs
        self._save = save
        self._saved = world.now()
        self._running: list[_Running] = []

    @contextlib.contextmanager
    def ending_all(self) -> Iterator[None]:
        """Leave no process behind."""
        try:
            yield
        finally:
            for one in self._running:
                one.process.end()

    def run(self, stage: Stage, until: float, at_once: int) -> None:
        """Run all steps of ``stage`` that fit before ``until``."""
        waiting = [] if stage.background else list(stage.steps)
        while waiting or self._of(stage):
            self._collect(stage)
            if self._world.now() >= until:
                for one in self._of(stage):
                    self._finish(one, "out of time")
                for step in waiting:
                    self._note(Outcome(stage=stage.name, step=step, verdict="not run"))
                return
            while waiting and len(self._of(stage)) < at_once:
                self.start(stage, waiting.pop(0), until)
            if self._of(stage):
                self._world.sleep(_TICK)
            if self._world.now() - self._saved >= SAVE_EVERY:
                self._keep()

    def start(self, stage: Stage, step: Step, until: float) -> None:
        """Start ``step``; one whose program is missing has failed."""
        left = max(1, int(until - self._world.now() - _CHILD_RESERVE))
        command = [str(left) if word == SECONDS else word for word in step.command]
        log = self._logs / log_name(stage, step)
        try:
            process = self._world.start(command, step.environment, log)
        except OSError as error:
            log.write_text(f"{error}\n")
            self._note(Outcome(stage=stage.name, step=step, verdict="failed"))
            return
        self._running.append(
            _Running(stage=stage, step=step, process=process, began=self._world.now())
        )

    def _of(self, stage: Stage) -> list[_Running]:
        return [one for one in self._running if one.stage is stage]

    def _collect(self, stage: Stage) -> None:
        for one in self._of(stage):
            status = one.process.poll()
            if status is not None:
                well = status == one.step.status and one.step.says in self._log(one)
                self._finish(one, "ok" if well else "failed")

    def _log(self, one: _Running) -> str:
        return (self._logs / log_name(one.stage, one.step)).read_text(errors="replace")

    def _finish(self, one: _Running, verdict: str) -> None:
        # Those that ended may have left children.
        one.process.end()
        self._running.remove(one)
        seconds = self._world.now() - one.began
        self._note(Outcome(stage=one.stage.name, step=one.step, verdict=verdict, seconds=seconds))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._keep()

    def _keep(self) -> None:
        self._saved = self._world.now()
        self._save(self.outcomes)


class Machine:
    """The clock and the processes of this machine."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **environment}

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start ``command`` in the repository, in a process group of its own."""
        with log.open("wb") as output:
            return _Group(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**self._environment, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )


class _Group:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
