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
from typing import Any

from bench.lease.plan import ROOT, SECONDS, Stage, Step, deadline

_TICK = 0.25
SAVE_EVERY = 10.0
"""Seconds between two archives while a step runs: what a killed call loses at most."""
# A child ends by itself so long before it would be ended.
_CHILD_RESERVE = 8.0


@dataclass(frozen=True)
class Machine:
    """The clock and the processes of this machine; ``environment`` is added to their own."""

    environment: Mapping[str, str]

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
        """Start ``command`` in the repository, in a process group of its own."""
        environment = {**os.environ, **self.environment, **environment}
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, process: Any) -> None:
        """End a process and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
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
    machine: Machine,
    *,
    end: float,
    cores: int,
    logs: Path,
    save: Callable[[Sequence[Outcome]], None],
) -> list[Outcome]:
    """Run ``stages`` in order, over at ``end`` of the machine's clock.

    A step that fails or has no time left doesn't stop those behind it. ``save`` gets the outcomes
    so far after each step, and every few seconds between.
    """
    runner = _Runner(machine, logs, save, saved=machine.now())
    try:
        for stage in stages:
            for step in stage.steps if stage.background else ():
                runner.start(stage, step, end)
        for number, stage in enumerate(stages):
            until = deadline(stages, number, machine.now(), end)
            runner.run(stage, until, processes(stage, cores))
    finally:  # no process is left behind
        for one in runner.running:
            machine.end(one.process)
    return runner.outcomes


@dataclass(eq=False)
class _Running:
    stage: Stage
    step: Step
    process: Any
    began: float


@dataclass(eq=False)
class _Runner:
    machine: Machine
    logs: Path
    save: Callable[[Sequence[Outcome]], None]
    saved: float
    outcomes: list[Outcome] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)

    def run(self, stage: Stage, until: float, at_once: int) -> None:
        """Run all steps of ``stage`` that fit before ``until``."""
        waiting = [] if stage.background else list(stage.steps)
        while waiting or self._of(stage):
            for one in self._of(stage):
                if (status := one.process.poll()) is not None:
                    log = (self.logs / log_name(stage.name, one.step)).read_text(errors="replace")
                    well = status == one.step.status and one.step.says in log
                    self._finish(one, "ok" if well else "failed")
            if self.machine.now() >= until:
                for one in self._of(stage):
                    self._finish(one, "out of time")
                for step in waiting:
                    self._note(Outcome(stage.name, step, "not run"))
                return
            while waiting and len(self._of(stage)) < at_once:
                self.start(stage, waiting.pop(0), until)
            if self._of(stage):
                self.machine.sleep(_TICK)
            if self.machine.now() - self.saved >= SAVE_EVERY:
                self._save()

    def start(self, stage: Stage, step: Step, until: float) -> None:
        """Start ``step``; one whose program is missing has failed."""
        now = self.machine.now()
        left = max(1, int(until - now - _CHILD_RESERVE))
        command = [str(left) if word == SECONDS else word for word in step.command]
        log = self.logs / log_name(stage.name, step)
        try:
            process = self.machine.start(command, step.environment, log)
        except OSError as error:
            log.write_text(f"{error}\n")
            self._note(Outcome(stage.name, step, "failed"))
        else:
            self.running.append(_Running(stage, step, process, now))

    def _of(self, stage: Stage) -> list[_Running]:
        return [one for one in self.running if one.stage is stage]

    def _finish(self, one: _Running, verdict: str) -> None:
        # Those that ended may have left children.
        self.machine.end(one.process)
        self.running.remove(one)
        seconds = self.machine.now() - one.began
        self._note(Outcome(one.stage.name, one.step, verdict, seconds))

    def _note(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._save()

    def _save(self) -> None:
        self.saved = self.machine.now()
        self.save(self.outcomes)
