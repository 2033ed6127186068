"""Runs the stages of a part within its time, and saves what there is as it grows."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.lease.plan import ROOT, SECONDS, Stage, Step, deadline

_TICK = 0.25
SAVE_EVERY = 10.0
"""Seconds between two archives while a step runs: what a killed call loses at most."""
# A child ends by itself so long before it would be ended.
_CHILD_RESERVE = 8.0


class World(Protocol):
    """A clock and processes: the machine's own, or those of a test.

    A process has ``poll``, the exit status or None, and ``end``, which ends all that it started.
    """

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a step: ``ok``, ``failed``, ``out of time`` or ``not run``."""

    stage: str
    step: Step
    verdict: str
    seconds: float = 0.0


def log_name(stage: str, step: Step) -> str:
    """Return the file name of a step's log."""
    return f"{stage}-{step.name}.log".replace(" ", "-")


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
    try:
        for stage in stages:
            for step in stage.steps if stage.background else ():
                runner.start(stage, step, end)
        for number, stage in enumerate(stages):
            until = deadline(stages, number, world.now(), end)
            runner.run(stage, until, processes(stage, cores))
    finally:  # no process is left behind
        for one in runner.running:
            one.process.end()
    return runner.outcomes


@dataclass(eq=False)
class _Running:
    stage: Stage
    step: Step
    process: Any
    began: float


@dataclass(eq=False)
class _Runner:
    world: World
    logs: Path
    save: Callable[[Sequence[Outcome]], None]
    outcomes: list[Outcome] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._saved = self.world.now()

    def run(self, stage: Stage, until: float, at_once: int) -> None:
        """Run all steps of ``stage`` that fit before ``until``."""
        waiting = [] if stage.background else list(stage.steps)
        while waiting or self._of(stage):
            self._collect(stage)
            if self.world.now() >= until:
                for one in self._of(stage):
                    self._finish(one, "out of time")
                for step in waiting:
                    self._note(stage, step, "not run")
                return
            while waiting and len(self._of(stage)) < at_once:
                self.start(stage, waiting.pop(0), until)
            if self._of(stage):
                self.world.sleep(_TICK)
            if self.world.now() - self._saved >= SAVE_EVERY:
                self._keep()

    def start(self, stage: Stage, step: Step, until: float) -> None:
        """Start ``step``; one whose program is missing has failed."""
        left = max(1, int(until - self.world.now() - _CHILD_RESERVE))
        command = [str(left) if word == SECONDS else word for word in step.command]
        log = self.logs / log_name(stage.name, step)
        try:
            process = self.world.start(command, step.environment, log)
        except OSError as error:
            log.write_text(f"{error}\n")
            self._note(stage, step, "failed")
        else:
            self.running.append(_Running(stage, step, process, self.world.now()))

    def _of(self, stage: Stage) -> list[_Running]:
        return [one for one in self.running if one.stage is stage]

    def _collect(self, stage: Stage) -> None:
        for one in self._of(stage):
            status = one.process.poll()
            if status is not None:
                log = (self.logs / log_name(stage.name, one.step)).read_text(errors="replace")
                well = status == one.step.status and one.step.says in log
                self._finish(one, "ok" if well else "failed")

    def _finish(self, one: _Running, verdict: str) -> None:
        # Those that ended may have left children.
        one.process.end()
        self.running.remove(one)
        self._note(one.stage, one.step, verdict, self.world.now() - one.began)

    def _note(self, stage: Stage, step: Step, verdict: str, seconds: float = 0.0) -> None:
        found = Outcome(stage=stage.name, step=step, verdict=verdict, seconds=seconds)
        self.outcomes.append(found)
        self._keep()

    def _keep(self) -> None:
        self._saved = self.world.now()
        self.save(self.outcomes)


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

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> _Group:
        """Start ``command`` in the repository, in a process group of its own."""
        environment = {**self._environment, **environment}
        how = {"cwd": ROOT, "env": environment, "start_new_session": True}
        with log.open("wb") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            return _Group(subprocess.Popen(command, **how, **streams))


class _Group:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
